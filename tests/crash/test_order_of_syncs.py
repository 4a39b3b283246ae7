"""Watch real saves from outside: whatever is relied on was synced before, and each sync of a save is needed for that.

No simulated disk is involved, and nothing of the writer's own code but what it asks of the system.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.crash.processes import SCRIPTS
from tests.crash.sync_order import Step, saves_in, steps_of, violations_of
from tests.crash.tracing import CALLS, calls_of_all_threads, traced

BALLAST_MIB = 17


def watched(root: Path, *options: str) -> list[list[Step]]:
    """Run one process of the job, and return the steps of each of its saves."""
    command = [sys.executable, str(SCRIPTS / "job_process.py"), str(root), *options]
    code, log = traced(command, root.parent / "log", "-e", f"trace={CALLS},fcntl")
    assert code == 0, log[-2000:]
    assert bool(re.search(r"O_DIRECT\b", log)) == ("--ballast-mib" in options)
    return [steps_of(calls, str(root / "generations")) for calls in saves_in(calls_of_all_threads(log))]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[list[Step]]:
    """Return four small saves, of which the third marks a checkpoint and the fourth deletes it."""
    return watched(tmp_path_factory.mktemp("small") / "run", "--saves", "4")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> list[list[Step]]:
    """Return one save of more than 16 MiB, which is written in several pieces and passes by the system's cache."""
    return watched(tmp_path_factory.mktemp("large") / "run", "--saves", "1", "--ballast-mib", str(BALLAST_MIB))


def unneeded(steps: list[Step]) -> list[Step]:
    """Return the syncs without which the order would still hold."""
    syncs = [n for n, step in enumerate(steps) if step.verb == "sync"]
    assert len(syncs) >= 6, steps
    return [steps[n] for n in syncs if not violations_of(steps[:n] + steps[n + 1 :])]


def test_all_that_a_save_relies_on_is_synced_before(small: list[list[Step]]) -> None:
    """Spec: C2.1, C3.1, C6.1, C12.4, F6.1"""
    assert [violations_of(steps) for steps in small] == [[], [], [], []]
    verbs = [{step.verb for step in steps} for steps in small]
    assert all({"make folder", "create", "write", "sync", "name"} <= each for each in verbs)
    assert "delete folder" in verbs[-1], "no deletion was seen"


def test_no_sync_of_a_save_can_be_left_out(small: list[list[Step]]) -> None:
    """So the watch notices when one is, each of them by itself."""
    assert [unneeded(steps) for steps in small] == [[], [], [], []]


def test_a_large_save_is_synced_like_a_small_one(large: list[list[Step]]) -> None:
    """Spec: C3.1"""
    (steps,) = large
    assert violations_of(steps) == []
    assert unneeded(steps) == []
    assert sum(step.verb == "write" and step.name.endswith(".safetensors") for step in steps) > 1


def test_the_index_is_written_while_the_data_is_on_its_way(small: list[list[Step]], large: list[list[Step]]) -> None:
    for steps in (*small, *large):
        written = next(n for n, step in enumerate(steps) if step.verb == "write" and step.name.endswith(".safetensors"))
        data = [n for n, step in enumerate(steps) if step.verb == "sync" and step.name.endswith(".safetensors")]
        index = [n for n, step in enumerate(steps) if step.verb == "sync" and re.fullmatch(r"rank-.*\.json", step.name)]
        assert written < index[0] < data[0]


def test_a_write_after_the_sync_of_its_file_is_noticed(small: list[list[Step]]) -> None:
    steps = small[0]
    last = max(n for n, step in enumerate(steps) if step.verb == "sync" and step.name.endswith(".safetensors"))
    late = [*steps[: last + 1], Step("write", steps[last].path), *steps[last + 1 :]]
    assert any("before the bytes" in text for text in violations_of(late))


def test_a_write_that_ends_while_its_file_is_synced_counts_as_not_synced() -> None:
    log = """\
1 write(3</r/generations/g/a>, ""..., 8 <unfinished ...>
2 fsync(3</r/generations/g/a> <unfinished ...>
1 <... write resumed>) = 8
2 <... fsync resumed>) = 0
1 linkat(4</r/generations/g>, ".tmp-1", 4</r/generations/g>, "manifest.json", 0) = 0
"""
    (found,) = (text for text in violations_of(steps_of(calls_of_all_threads(log), "/r")) if "C3.1" in text)
    assert "['/r/generations/g/a']" in found
