"""Kill a real torch training while it saves, and compare what it goes on with, bit for bit, with an undisturbed one."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.crash.processes import SCRIPTS, Process
from tests.warm import WarmPython


def losses_until(python: WarmPython, root: Path, until: int, *options: str) -> dict[int, str]:
    """Train to the end, and return each update's loss."""
    script, logs = SCRIPTS / "torch_training.py", root.parent
    ended = python.run(script, root, "--until", until, *options, folder=logs, logs=logs)
    assert ended.returncode == 0, ended.errors
    said = map(json.loads, ended.output.splitlines())
    return {line["update"]: line["loss"] for line in said if "update" in line}


def train_with_kills(
    python: WarmPython, root: Path, chance: random.Random, *options: str, kills: int, until: int
) -> dict[int, str]:
    """Kill at random moments, let each start go on by itself, and return each update's loss; no two may disagree."""
    losses: dict[int, str] = {}
    done = 0
    for _ in range(kills):
        process = Process("torch_training.py", root, "--until", until, *options)
        try:
            restored = process.line()
            assert restored["restored"] >= done
            assert restored["promise"] == "exact"
            said = [process.line() for _ in range(chance.randrange(2, 9))]
            for _ in range(chance.randrange(4000)):
                process.popen.poll()
        finally:
            said += process.kill()
        for line in filter(None, said):
            assert losses.setdefault(line["update"], line["loss"]) == line["loss"]
        # The last update printed may not have come to its save; the one before it has, or is being saved beside it.
        done = max(losses) - (2 if options else 1)
    print(f"counted: {kills} kills")
    return {**losses, **losses_until(python, root, until, *options)}


@pytest.mark.parametrize("options", [("--background",)], ids=["in the background"])
def test_a_training_killed_while_it_saves_goes_on_bit_for_bit(
    tmp_path: Path, warm_python: WarmPython, chance: random.Random, options: tuple[str, ...]
) -> None:
    undisturbed = losses_until(warm_python, tmp_path / "undisturbed", 20)
    killed = train_with_kills(warm_python, tmp_path / "killed", chance, *options, kills=1, until=20)
    assert killed == undisturbed


@pytest.mark.soak
@pytest.mark.parametrize("options", [(), ("--background",)], ids=["in the foreground", "in the background"])
def test_a_training_killed_many_times_while_it_saves_goes_on_bit_for_bit(
    tmp_path: Path, warm_python: WarmPython, chance: random.Random, options: tuple[str, ...]
) -> None:
    undisturbed = losses_until(warm_python, tmp_path / "undisturbed", 120)
    killed = train_with_kills(warm_python, tmp_path / "killed", chance, *options, kills=20, until=120)
    assert killed == undisturbed
