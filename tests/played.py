"""Play a run that branched, and ask a reader what it sees."""

from __future__ import annotations

from collections.abc import Sequence

from safepoint.catalog import Generation, GenerationState, examine, examine_all, read_lineage
from safepoint.format.names import GenerationName
from safepoint.format.records import LineageLink
from safepoint.storage.memory import MemoryStorage
from tests import build

Chain = tuple[LineageLink, ...]
GENERATION_50, GENERATION_100 = (f"step-{step:012d}-i000001-0badcafe" for step in (50, 100))


def resumed(chain: Sequence[LineageLink], incarnation: int, generation: str) -> Chain:
    """Return the chain of a start that resumed a generation of the given chain."""
    return (*chain, LineageLink(incarnation, generation, int(generation[5:17])))


def steps(storage: MemoryStorage, *states: GenerationState) -> list[int]:
    """Return the steps of the generations in some state, newest first."""
    return [found.name.step for found in examine_all(storage, read_lineage(storage)) if found.state in states]


def live(storage: MemoryStorage) -> list[int]:
    return steps(storage, GenerationState.COMMITTED)


def the(storage: MemoryStorage, generation: str) -> Generation:
    name = GenerationName.parse(generation)
    assert name is not None
    return examine(storage, name, read_lineage(storage))


def damaged_files(storage: MemoryStorage) -> set[str]:
    return {entry.file for entry in read_lineage(storage).damage}


def branched(storage: MemoryStorage) -> tuple[Chain, Chain]:
    """Write a run whose first start reached 150 and whose second went on from 100 to 200."""
    first = build.begin(storage)
    names = [build.write_generation(storage, step, chain=first) for step in (50, 100, 150)]
    second = resumed(first, 2, names[1])
    build.write_incarnation(storage, 2, chain=second)
    build.write_generation(storage, 200, chain=second)
    return first, second
