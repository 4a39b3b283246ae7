"""Kill real processes with SIGKILL while they save to real files, and let the next one go on by itself."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.crash.job import weights_at
from tests.crash.processes import Process, check_resumes


def kill_while_saving(root: Path, chance: random.Random, *, done: int) -> int:
    """Start a process, check what it restored, kill it at a random moment, and return the last save it reported.

    The moment is a random number of saves, and then of looks at the process, away.
    """
    process = Process("job_process.py", root)
    try:
        first = process.line()
        assert first["restored"] in (done, done + 1), first
        step = first["restored"]
        if step:
            assert first["state"] == [[step, weights_at(step).hex()]]
        for _ in range(chance.randrange(1, 6)):
            step = process.line()["saved"]
        for _ in range(chance.randrange(3000)):
            process.popen.poll()
    finally:
        rest = process.kill()
    return max([step, *(entry["saved"] for entry in rest)])


def kill_many(root: Path, chance: random.Random, *, kills: int) -> None:
    done = 0
    for _ in range(kills):
        done = kill_while_saving(root, chance, done=done)
    check_resumes(root, at_least=done, at_most=done + 1)
    print(f"counted: {kills} kills, {done} saves")


def test_kills_at_random_moments_lose_at_most_the_save_in_flight(tmp_path: Path, chance: random.Random) -> None:
    kill_many(tmp_path / "run", chance, kills=3)


@pytest.mark.soak
def test_a_hundred_kills_at_random_moments_lose_at_most_the_save_in_flight(
    tmp_path: Path, chance: random.Random
) -> None:
    kill_many(tmp_path / "run", chance, kills=100)
