"""Stop a saving process at a system call (SIGSTOP), let another start go on, and let it wake (SIGCONT).

The save that is watched follows three others, so that it also marks one checkpoint and deletes another.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from safepoint.catalog import GenerationState, examine_all, read_lineage
from safepoint.storage.local import LocalStorage
from tests.crash.job import whole_state
from tests.crash.processes import SCRIPTS, Process, own_job, run_of
from tests.crash.tracing import Call, calls_of_the_main_thread, traced

BEFORE = (1, 2, 3)
SAVED = 4
FENCED = 6
LONGEST_S = 30


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of three checkpoints, of which the oldest is marked for deletion."""
    return run_of(BEFORE, tmp_path_factory.mktemp("prepared") / "run")


@pytest.fixture(scope="module")
def calls(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Call]:
    """Return the main thread's calls of one undisturbed save, in their order."""
    root = tmp_path_factory.mktemp("watched") / "run"
    shutil.copytree(prepared, root)
    command = [sys.executable, str(SCRIPTS / "job_process.py"), str(root), "--saves", "1"]
    code, log = traced(command, root.parent / "log")
    assert code == 0
    found = calls_of_the_main_thread(log)
    begin, end = (
        next(place for place, call in enumerate(found) if f"/{mark}" in call.text)
        for mark in ("save-begins", "save-ends")
    )
    return found[begin + 1 : end]


def stopped_at(call: Call, root: Path) -> Process:
    """Start a job that waits before its saves, and is stopped once this call of its first save is done."""
    trace = ["strace", "-f", "-o", "/dev/null", "-e", f"inject={call.name}:signal=SIGSTOP:when={call.number}"]
    return Process("job_process.py", root, "--waits", before=trace)


def process_under(tracer: subprocess.Popen[str]) -> int:
    """Return the process that a tracer has started."""
    (child,) = Path(f"/proc/{tracer.pid}/task/{tracer.pid}/children").read_text().split()
    return int(child)


def wait_until_stopped(pid: int) -> None:
    """Wait until every thread stands still; a tracer makes that invisible to `waitid` of anyone else."""
    end = time.monotonic() + LONGEST_S
    while time.monotonic() < end:
        states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
        if set(states) <= {"T", "t"}:
            return
        threading.Event().wait(0.005)
    raise AssertionError(f"process {pid} was not stopped: {states}")


def outlive(
    prepared: Path, folder: Path, call: Call, *, saves: bool = False, resumes_at: tuple[int, ...]
) -> dict[int, GenerationState]:
    """Stop at a call, start another job, wake the first one, and return what a reader then sees.

    The second one restores before the first wakes, and saves before that as well, or afterwards only.
    """
    root = folder / "run"
    shutil.copytree(prepared, root)
    old = stopped_at(call, root)
    try:
        assert old.line()["restored"] == BEFORE[-1]
        old.go()
        pid = process_under(old.popen)
        wait_until_stopped(pid)
        new = own_job(root)
        resumed = new.start().step
        assert resumed in resumes_at
        if saves:
            new.live(resumed + 2)
        os.kill(pid, signal.SIGCONT)
        said = old.line()
        if "saved" in said:
            old.go()
            said = old.line()
        assert said["error"] == "FencedError", said
        old.rest()
        assert old.popen.returncode == FENCED
    finally:
        old.popen.kill()
        old.popen.communicate(timeout=LONGEST_S)
    new.live(resumed + 3)
    new.end()
    last = own_job(root)
    assert last.start().step == resumed + 3
    assert last.state() == whole_state(resumed + 3)
    last.end()
    storage = LocalStorage(root)
    return {entry.name.step: entry.state for entry in examine_all(storage, read_lineage(storage))}


def published(calls: list[Call]) -> int:
    return next(place for place, call in enumerate(calls) if call.name == "linkat" and "manifest.json" in call.text)


def test_a_save_that_is_stopped_in_its_middle_publishes_nothing(
    prepared: Path, calls: list[Call], tmp_path: Path
) -> None:
    """Spec: C1.2, C5.2"""
    written = next(call for call in calls if call.name == "fsync" and ".safetensors" in call.text)
    states = outlive(prepared, tmp_path, written, resumes_at=BEFORE[-1:])
    assert SAVED not in states, "the newer start has swept it"


@pytest.mark.soak
def test_a_publish_that_is_stopped_behind_the_check_is_never_chosen(
    prepared: Path, calls: list[Call], tmp_path: Path
) -> None:
    """Spec: C6.1, C9.3"""
    synced = [call for call in calls[: published(calls)] if call.name == "fsync"][-1]
    states = outlive(prepared, tmp_path, synced, resumes_at=BEFORE[-1:])
    assert states[SAVED] is GenerationState.DELETED, "superseded, and marked once the newer start was past it"


def test_a_deletion_that_is_stopped_and_wakes_beside_a_restored_successor_destroys_nothing(
    prepared: Path, calls: list[Call], tmp_path: Path
) -> None:
    """Spec: C12.1"""
    deleting = [call for call in calls[published(calls) :] if call.name == "unlinkat" and ".tmp-" not in call.text]
    states = outlive(prepared, tmp_path, deleting[0], resumes_at=(SAVED,))
    assert {SAVED, SAVED + 3} <= {step for step, state in states.items() if state is GenerationState.COMMITTED}


@pytest.mark.soak
@pytest.mark.parametrize("saves", [False, True])
def test_a_save_that_is_stopped_at_any_call_harms_nobody(
    prepared: Path, calls: list[Call], tmp_path: Path, saves: bool
) -> None:
    """Spec: C5.2, C6.1, C12.1"""
    changing = [call for call in calls if call.name.startswith(("mkdir", "pwrite", "write", "fsync", "link", "unlink"))]
    for number, call in enumerate(changing):
        outlive(prepared, tmp_path / str(number), call, saves=saves, resumes_at=(BEFORE[-1], SAVED))
    print(f"counted: {len(changing)} stops")
