"""Damage a small run file by file, start on it, and judge what comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from safepoint.errors import CorruptionError
from safepoint.restoring.outcome import RestoreReport
from safepoint.retention.policy import keep
from safepoint.storage.base import Storage
from safepoint.storage.memory import MemoryStorage
from safepoint.testing.ambient import FakeWorld
from tests.crash.job import Job, check_state_is_told, whole_state

Files = dict[str, bytes]
_LIMIT_BYTES = 1 << 20


def small_run() -> Files:
    """Return the files of a run of two starts: steps 20 (marked for deletion), 30, 40 and 50, and a refused start.

    The first start died, the second ended in order. Steps 10 and 20 were let go; the data of 10 is deleted already.
    """
    storage, world = MemoryStorage(), FakeWorld()
    first = Job(storage, world, pid=1, keeps=keep(last=3))
    first.start()
    first.live(10, 20, 30)
    first.die()
    second = Job(storage, world, pid=2, keeps=keep(last=3))
    second.start()
    second.live(40, 50)
    second.end()
    world.states[2] = "gone"
    files = files_of(storage)
    present = sorted({path.split("/")[1][:17] for path in files if path.startswith("generations/")})
    assert present == ["step-000000000020", "step-000000000030", "step-000000000040", "step-000000000050"]
    assert sum(path.endswith("deleted.json") for path in files) == 1
    return files


def files_of(storage: Storage, folder: str = "") -> Files:
    """Return every file of a storage by its path."""
    found: Files = {}
    for entry in storage.list(folder):
        path = f"{folder}/{entry.name}" if folder else entry.name
        if entry.is_folder:
            found |= files_of(storage, path)
        else:
            found[path] = storage.read(path, limit_bytes=_LIMIT_BYTES)
    return found


def storage_of(files: Mapping[str, bytes]) -> MemoryStorage:
    """Return a storage that holds these files."""
    storage = MemoryStorage()
    storage.make_root()
    for folder in sorted({path.rpartition("/")[0] for path in files if "/" in path}):
        storage.make_folder(folder)
    for path, data in files.items():
        storage.publish(path, data)
    return storage


@dataclass(frozen=True, slots=True)
class Outcome:
    """Say what a start made of a storage: a report, or the text of a typed error; and the job."""

    report: RestoreReport | None
    error: str
    job: Job


def start_on(storage: Storage) -> Outcome:
    """Start a third process on a run whose earlier ones are gone. Any error but damage is let through."""
    job = Job(storage, FakeWorld(states={1: "gone", 2: "gone"}), pid=3)
    try:
        return Outcome(job.start(), "", job)
    except CorruptionError as exc:
        check_state_is_told(job, exc)
        return Outcome(None, str(exc), job)
    finally:
        job.die()


def needed_by(step: int, files: Mapping[str, bytes]) -> set[str]:
    """Return the files without which a step cannot be restored."""
    folder = f"generations/step-{step:012d}-"
    return {path for path in files if path.startswith(folder) and not path.endswith("deleted.json")}


def judge(files: Mapping[str, bytes], *touched: str) -> RestoreReport | None:
    """Start on damaged files, check that nothing wrong was taken and nothing was hidden, and return the report.

    Args:
        touched: The paths of what differs from the sound run.
    """
    outcome = start_on(storage_of(files))
    if outcome.report is None:
        assert any(path in outcome.error for path in touched), outcome.error
        return None
    step = outcome.report.step
    assert step in (20, 30, 40, 50), "a fresh start"
    assert outcome.job.state() == whole_state(step)
    refused = {f"generations/{entry.generation}/{entry.file}": entry.reason for entry in outcome.report.refused}
    assert all(reason for reason in refused.values())
    if step == 50:
        return outcome.report
    newer = [entry for entry in outcome.report.refused if int(entry.generation[5:17]) > step]
    assert {int(entry.generation[5:17]) for entry in newer} == {40, 50} - set(range(step + 1))
    assert any(path in refused or path in " ".join(refused.values()) for path in touched), refused
    return outcome.report
