"""Saves with retention after them, and what lies in a run then."""

from __future__ import annotations

from safepoint.ambient import SystemAmbient
from safepoint.catalog import GenerationState, examine_all, read_lineage
from safepoint.format.index import ObjectReference
from safepoint.format.names import generation_path
from safepoint.format.records import LineageLink
from safepoint.retention.policy import Keep, keep
from safepoint.retention.retain import RetentionReport, retain
from safepoint.storage.base import Storage
from tests.build import RUN, Values, floats, write_generation

DATA = "rank-00000-of-00001.safetensors"
INDEX = "rank-00000-of-00001.json"
CHAIN = (LineageLink(1, None, 0),)


def save(
    storage: Storage, step: int, policy: Keep | None = None, *, chain: tuple[LineageLink, ...] = CHAIN
) -> RetentionReport:
    write_generation(storage, step, chain=chain)
    return after_save(storage, policy, chain[-1].incarnation)


def after_save(storage: Storage, policy: Keep | None = None, incarnation: int = 1) -> RetentionReport:
    policy = policy or keep(last=2)
    return retain(storage, run=RUN, incarnation=incarnation, policy=policy, ambient=SystemAmbient())


def borrowing_from(storage: Storage, base: str) -> dict[str, dict[str, Values]]:
    """Return items of which a chunk lies in the data file of an ancestor that holds ``model/w`` of two floats."""
    found = next(entry for entry in examine_all(storage, read_lineage(storage)) if entry.text == base)
    assert found.manifest is not None
    digest = next(reference.digest for reference in found.manifest.objects if reference.name == DATA)
    reference = ObjectReference(base, DATA, storage.size(generation_path(base, DATA)), digest)
    borrowed = Values("float32", (2,), floats(1.0, 2.0).data, borrowed={(0, 2): (reference, 4096)})
    return {"model": {"w": borrowed, "b": floats(3.0)}}


def folders(storage: Storage) -> list[int]:
    return [int(entry.name[5:17]) for entry in storage.list("generations") if entry.is_folder]


def steps(storage: Storage, state: GenerationState = GenerationState.COMMITTED) -> list[int]:
    found = examine_all(storage, read_lineage(storage))
    return sorted(entry.name.step for entry in found if entry.state is state)


def everything(storage: Storage, folder: str = "") -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for entry in storage.list(folder):
        path = f"{folder}/{entry.name}" if folder else entry.name
        if entry.is_folder:
            found.update(everything(storage, path))
        else:
            found[path] = storage.read(path, limit_bytes=1 << 20)
    return found
