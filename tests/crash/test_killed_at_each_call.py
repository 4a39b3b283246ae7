"""Kill a saving process at the system calls of one save, and look at the order of these calls: seen from outside.

The save that is watched follows three others, so that it also marks one checkpoint and deletes another.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.crash.processes import SCRIPTS, check_resumes, run_of
from tests.crash.tracing import KILLED, Call, calls_of_the_main_thread, first_calls, traced

BEFORE = (1, 2, 3)
SAVED = 4
PIECE_BYTES = 4096


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of three checkpoints, of which the oldest is marked for deletion."""
    return run_of(BEFORE, tmp_path_factory.mktemp("prepared") / "run")


@pytest.fixture(scope="module")
def threaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Call]]:
    """Return a run of three larger checkpoints, and the calls of the thread that writes the data file of a fourth."""
    root = run_of(BEFORE, tmp_path_factory.mktemp("threaded") / "run", ballast_bytes=1 << 20)
    shutil.copytree(root, root.parent / "watched" / "run")
    code, log = trace(root.parent / "watched" / "run", root.parent / "log", ballast_mib=1)
    assert code == 0
    main = log.split()[0]
    return root, [call for thread, call in first_calls(log) if thread != main and ".safetensors" in call.text]


@pytest.fixture(scope="module")
def calls(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    """Return the calls of one undisturbed save."""
    root = tmp_path_factory.mktemp("watched") / "run"
    shutil.copytree(prepared, root)
    code, log = trace(root, root.parent / "log")
    assert code == 0
    return calls_of_the_save(log)


def trace(root: Path, log: Path, *options: str, ballast_mib: int = 0) -> tuple[int, str]:
    """Run one start with one save under strace, in which a thread writes ballast; return the exit code and the log."""
    command = [sys.executable, str(SCRIPTS / "job_process.py"), str(root), "--saves", "1"]
    if ballast_mib:
        command += ["--ballast-mib", str(ballast_mib), "--piece-bytes", str(PIECE_BYTES)]
    return traced(command, log, *options)


def calls_of_the_save(log: str) -> list[Call]:
    """Return the main thread's calls between the marks that the script leaves."""
    found = calls_of_the_main_thread(log)
    begin, end = (
        next(place for place, call in enumerate(found) if f"/{mark}" in call.text)
        for mark in ("save-begins", "save-ends")
    )
    return found[begin + 1 : end]


def kill_at(prepared: Path, folder: Path, call: Call, *, is_done: bool, ballast_mib: int = 0) -> None:
    """Kill at a call, which is done or is not, and let the next start go on."""
    root = folder / f"{call.name}-{call.number}-{is_done}" / "run"
    shutil.copytree(prepared, root)
    code, log = trace(root, root.parent / "log", "-e", call.kill(is_done=is_done), ballast_mib=ballast_mib)
    assert code in KILLED, (call, log[-2000:])
    check_resumes(root, at_least=BEFORE[-1], at_most=SAVED, ballast_bytes=ballast_mib << 20)
    shutil.rmtree(root.parent)


def test_a_save_is_made_of_many_calls(calls: list[Call]) -> None:
    names = {call.name for call in calls}
    assert {"openat", "write", "fsync", "linkat", "unlinkat"} <= names
    assert len(calls) > 100


def test_a_kill_at_a_call_of_a_save_loses_at_most_that_save(
    prepared: Path, calls: list[Call], tmp_path: Path, chance: random.Random
) -> None:
    """Around each publish, and at a sample of all calls: of the save, of its marks and of its deletions."""
    (publish,) = (call for call in calls if call.name == "linkat" and "manifest.json" in call.text)
    kill_at(prepared, tmp_path, publish, is_done=False)
    kill_at(prepared, tmp_path, publish, is_done=True)
    for call in chance.sample(calls, 3):
        kill_at(prepared, tmp_path, call, is_done=chance.random() < 0.5)


@pytest.mark.soak
@pytest.mark.parametrize("is_done", [True, False])
def test_a_kill_at_any_call_of_a_save_loses_at_most_that_save(
    prepared: Path, calls: list[Call], tmp_path: Path, is_done: bool
) -> None:
    for call in calls:
        kill_at(prepared, tmp_path, call, is_done=is_done)
    print(f"counted: {len(calls)} kills")


@pytest.mark.soak
@pytest.mark.parametrize("is_done", [True, False])
def test_a_kill_of_a_save_at_any_call_of_the_thread_that_writes_loses_at_most_that_save(
    threaded: tuple[Path, list[Call]], tmp_path: Path, is_done: bool
) -> None:
    root, calls = threaded
    assert len(calls) > 200, "the thread's calls come too late to be told from the main thread's"
    for call in calls[::8]:
        kill_at(root, tmp_path, call, is_done=is_done, ballast_mib=1)
    print(f"counted: {len(calls[::8])} kills")


def test_everything_is_durable_before_the_manifest_has_its_name(calls: list[Call]) -> None:
    """Spec: C3.1, C6.1, F6.1"""
    steps = [step for step in map(step_of, calls) if step]
    generation = next(path.rpartition("/")[0] for verb, path in steps if verb == "create" and "safetensors" in path)
    (named,) = (place for place, step in enumerate(steps) if step == ("name", f"{generation}/manifest.json"))
    for suffix in (".safetensors", "of-00001.json"):
        (created,) = (n for n, (verb, path) in enumerate(steps) if verb == "create" and path.endswith(suffix))
        path = steps[created][1]
        synced = steps.index(("sync", path))
        last_write = max(n for n, step in enumerate(steps) if step == ("write", path))
        folder_synced = steps.index(("sync", generation), synced)
        assert created < last_write < synced < folder_synced < named
    assert steps.index(("sync", generation.rpartition("/")[0])) < named
    temporary = [n for n, (verb, path) in enumerate(steps) if f"{generation}/.tmp-" in path and n < named]
    assert [steps[n][0] for n in temporary] == ["create", "write", "sync"]
    assert ("sync", generation) in steps[named:]


def test_no_name_is_given_over_an_existing_one_and_nothing_is_deleted_before_the_commit(calls: list[Call]) -> None:
    """Spec: F6.1, C7.1, C12.1"""
    assert [call for call in calls if call.name.startswith("rename")] == []
    committed = next(n for n, call in enumerate(calls) if call.name == "linkat" and "manifest.json" in call.text)
    early = [call.text for call in calls[:committed] if call.name in ("unlink", "unlinkat", "rmdir", "ftruncate")]
    assert early == []
    removed = [call.text for call in calls[committed:] if call.name in ("unlink", "unlinkat", "rmdir")]
    assert any("safetensors" in text for text in removed), "no retention was seen"


def step_of(call: Call) -> tuple[str, str] | None:
    """Return (what was done, to which path) for the calls that the order is about."""
    folder = re.match(r"\d+<([^>]*)>", call.text)
    here = folder[1] if folder else ""
    texts = re.findall(r'"([^"]*)"', call.text)
    if call.name == "openat" and "O_EXCL" in call.text:
        return "create", os.path.join(here, texts[0])
    if call.name == "linkat":
        return "name", os.path.join(here, texts[1])
    if call.name in ("write", "pwrite64"):
        return "write", here
    return ("sync", here) if call.name in ("fsync", "fdatasync") else None
