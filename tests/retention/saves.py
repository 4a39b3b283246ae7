"""Saves with retention after them, and what lies in a run then."""

from __future__ import annotations

from safepoint.ambient import SystemAmbient
from safepoint.catalog import GenerationState, examine_all, read_lineage
from safepoint.format.records import LineageLink
from safepoint.retention.policy import Keep, keep
from safepoint.retention.retain import RetentionReport, retain
from safepoint.storage.base import Storage
from tests.build import RUN, write_generation

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
