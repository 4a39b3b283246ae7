"""Kill `safepoint prune` at its system calls: the run goes on from its newest checkpoint all the same."""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path

import pytest

from safepoint.storage.local import LocalStorage
from tests.crash.processes import check_resumes, own_job
from tests.crash.tracing import KILLED, Call, calls_of_all_threads, calls_of_the_main_thread, traced

STEPS = (1, 2, 3, 4, 5, 6)
PROGRAM = "import sys; from safepoint.cli import main; sys.exit(main())"


def prune(root: Path, *options: str) -> tuple[int, str]:
    command = [sys.executable, "-c", PROGRAM, "prune", str(root), "--keep-last", "2"]
    return traced(command, root.parent / "log", *options)


@pytest.fixture(scope="module", params=["marks", "deletes"])
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Call]]:
    """Return a run of six checkpoints, and the calls of a prune that marks four of them, or that deletes these."""
    folder = tmp_path_factory.mktemp(request.param)
    job = own_job(folder / "run", keeps=None)
    job.start()
    job.live(*STEPS)
    job.end()
    if request.param == "deletes":
        assert prune(folder / "run")[0] == 0
    shutil.copytree(folder / "run", folder / "watched" / "run")
    code, log = prune(folder / "watched" / "run")
    assert code == 0, log
    changes = ("mkdir", "write", "pwrite", "fsync", "link", "rename", "unlink", "rmdir", "openat")
    named = [call for call in calls_of_all_threads(log) if call.name.startswith(changes)]
    calls = [call for call in calls_of_the_main_thread(log) if call.name.startswith(changes)]
    watched = str(folder / "watched")
    found = [call for call in calls if watched in call.text]
    assert len(found) == sum(watched in call.text for call in named), "another thread touches the run as well"
    return folder / "run", found


def kill_at(root: Path, folder: Path, call: Call, *, is_done: bool) -> None:
    """Kill at a call, let the next start go on, and prune again; what was resumed last stays beside the newest two."""
    copy = folder / f"{call.name}-{call.number}-{is_done}" / "run"
    shutil.copytree(root, copy)
    code, log = prune(copy, "-e", call.kill(is_done=is_done))
    assert code in KILLED, (call, log[-2000:])
    check_resumes(copy, at_least=STEPS[-1], at_most=STEPS[-1])
    job = own_job(copy, keeps=None)
    assert job.start().refused == ()
    job.live(STEPS[-1] + 2)
    job.end()
    for _ in range(2):
        assert prune(copy)[0] == 0
    names = [entry.name for entry in LocalStorage(copy).list("generations")]
    assert [int(name[5:17]) for name in names] == [6, 7, 8]
    shutil.rmtree(copy.parent)


def test_a_kill_at_a_call_of_a_prune_costs_no_checkpoint_that_stays(
    prepared: tuple[Path, list[Call]], tmp_path: Path, chance: random.Random
) -> None:
    """Spec: C12.1, C12.4"""
    root, calls = prepared
    changing = [call for call in calls if call.name.startswith(("link", "unlink", "rmdir"))]
    for call in chance.sample(changing, 1) + chance.sample(calls, 1):
        kill_at(root, tmp_path, call, is_done=chance.random() < 0.5)


@pytest.mark.soak
@pytest.mark.parametrize("is_done", [True, False])
def test_a_kill_at_any_call_of_a_prune_costs_no_checkpoint_that_stays(
    prepared: tuple[Path, list[Call]], tmp_path: Path, is_done: bool
) -> None:
    """Spec: C12.1, C12.4"""
    root, calls = prepared
    for call in calls:
        kill_at(root, tmp_path, call, is_done=is_done)
    print(f"counted: {len(calls)} kills")
