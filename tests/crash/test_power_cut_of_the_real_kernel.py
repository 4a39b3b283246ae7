"""Copy the image of a real file system at random instants while a process saves to it, and start on each copy.

A copy is what a disk holds whose power goes at that instant:

1. It is atomic. The image lies on xfs, which copies it by sharing its blocks and holds off every write until that is
   done. So a copy has each request that the kernel had completed, no part of a later one, and its journal can be
   replayed like after a real cut. A copy that reads the image piece by piece would mix instants, and prove nothing.
2. What only the kernel's memory held, bytes and names that nobody synced, is lost in it.
3. What the kernel had sent to the device is kept, synced or not. A disk that also loses what is in its own cache is
   what `test_every_crash_state.py` simulates.

In every copy the newest checkpoint is whole and of one step, and never older than a save that was reported done before
the copy began.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.crash.file_systems import MIB, Image, make_image
from tests.crash.job import whole_state
from tests.crash.processes import Process, own_job, running

OUTER_BYTES = 2048 * MIB
ROUNDS_VARIABLE = "SAFEPOINT_TEST_POWER_CUTS"
SAVES_BETWEEN = 3
LOOKS_AT_A_SAVE = 20_000


class Follower:
    """Read what a process says as soon as it says it."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._newest = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def newest(self) -> int:
        """Return the newest step that was reported saved."""
        return self._newest

    def wait_for(self, step: int) -> None:
        """Wait until this step was reported saved."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._newest >= step, timeout=60), self._process.popen.poll()

    def _read(self) -> None:
        while line := self._process.line():
            with self._changed:
                self._newest = int(line.get("saved", 0))
                self._changed.notify_all()


@contextmanager
def saving_process(kind: str, folder: Path) -> Iterator[tuple[Image, Process]]:
    """Mount a file system whose image can be copied in one step, and let a process save to it when it is told to."""
    outer = make_image("xfs", folder / "outer.img", size_bytes=OUTER_BYTES)
    with outer.mounted(skips=True) as below:
        inner = make_image(kind, below / "disk.img")
        with inner.mounted(skips=True) as path, running("job_process.py", path / "run", "--waits") as process:
            yield inner, process


def check_copy(copy: Image, *, at_least: int, at_most: int) -> int:
    """Start on a copy, check what is there, save, start again, and return the step that was resumed."""
    with copy.mounted() as folder:
        root = folder / "run"
        # The process that holds the run is alive: its power is not really off.
        job = own_job(root, takeover=True)
        try:
            report = job.start()
            assert at_least <= report.step <= at_most, report.refused
            assert report.step == 0 or job.state() == whole_state(report.step)
            assert [text for text in map(str, report.refused) if "never completed" not in text] == []
            job.live(report.step + 1)
        finally:
            job.end()
        again = own_job(root)
        try:
            assert again.start().step == report.step + 1
        finally:
            again.end()
    copy.file.unlink()
    return report.step


def cut_many(kind: str, folder: Path, chance: random.Random, *, rounds: int) -> None:
    """Copy again and again: in each third round as soon as a save was reported done, else at some instant of a save."""
    with saving_process(kind, folder) as (image, process):
        follower = Follower(process)
        step, resumed, cut_off = 0, 0, 0
        for number in range(rounds):
            for _ in range(chance.randrange(1, SAVES_BETWEEN)):
                process.go()
                step += 1
                follower.wait_for(step)
            if number % 3:
                process.go()
                step += 1
                for _ in range(chance.randrange(LOOKS_AT_A_SAVE)):
                    process.popen.poll()
            reported = follower.newest
            copy = image.clone(image.file.with_name(f"copy-{number}.img"))
            resumed = check_copy(copy, at_least=reported, at_most=step)
            cut_off += resumed < step
            follower.wait_for(step)
    print(
        f"counted: {rounds} copies of {kind} in {resumed} saves: none older than reported, none mixed; "
        f"{cut_off} cut a save off"
    )


@pytest.mark.parametrize(("kind", "rounds"), [("ext4", 2), ("xfs", 2)])
def test_a_power_cut_at_a_random_instant_loses_at_most_the_save_in_flight(
    kind: str, rounds: int, tmp_path: Path, chance: random.Random
) -> None:
    cut_many(kind, tmp_path, chance, rounds=rounds)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_thousand_power_cuts_at_random_instants_lose_at_most_the_save_in_flight(
    kind: str, tmp_path: Path, chance: random.Random
) -> None:
    """Five hundred of each file system; `SAFEPOINT_TEST_POWER_CUTS` says another number."""
    cut_many(kind, tmp_path, chance, rounds=int(os.environ.get(ROUNDS_VARIABLE, 500)))
