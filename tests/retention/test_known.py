"""What retention keeps from one save to the next is never older than what lies there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from safepoint.ambient import SystemAmbient
from safepoint.catalog import examine_all, read_lineage
from safepoint.errors import CorruptionError, ObjectMissingError
from safepoint.format.encoding import seal
from safepoint.format.names import MANIFEST, generation_path, incarnation_path
from safepoint.format.plain import encode_plain
from safepoint.format.records import RefusedRecord
from safepoint.notes import Manifests
from safepoint.retention.pins import pin
from safepoint.retention.policy import Keep, keep
from safepoint.retention.retain import Known, RetentionReport, retain
from safepoint.retention.sweep import may_sweep
from safepoint.storage.memory import MemoryStorage
from tests.build import RUN, begin, flip, rewrite, write_generation, write_incarnation
from tests.retention.saves import CHAIN, DATA, everything, folders


def named(step: int, incarnation: int = 1) -> str:
    return f"step-{step:012d}-i{incarnation:06d}-0badcafe"


def refuse(storage: MemoryStorage) -> None:
    record = RefusedRecord(1, RUN, 2, "another start was alive", "00")
    storage.publish(incarnation_path(2, "refused.json"), seal(record))


def give_other_metrics(storage: MemoryStorage) -> None:
    """Have a checkpoint's manifest be another one, which says that its loss was the best."""
    path = generation_path(named(2), MANIFEST)
    begin(other := MemoryStorage())
    write_generation(other, 2, chain=CHAIN, metrics={"loss": encode_plain(0.0)})
    rewrite(storage, path, other.read(path, limit_bytes=1 << 20))


CHANGES: dict[str, Callable[[MemoryStorage], object]] = {
    "nothing": lambda storage: None,
    "a manifest is damaged": lambda storage: flip(storage, generation_path(named(2), MANIFEST)),
    "a manifest is gone": lambda storage: storage.delete(generation_path(named(2), MANIFEST)),
    "data are gone": lambda storage: storage.delete(generation_path(named(2), DATA)),
    "a manifest is another one": give_other_metrics,
    "one is pinned": lambda storage: pin("", 2, reason="wanted", storage=storage),
    "a newer start came": lambda storage: write_incarnation(storage, 2),
    "a newer start came and went": lambda storage: [write_incarnation(storage, 2), refuse(storage)],
}


def retained(storage: MemoryStorage, known: Known | None, policy: Keep | None) -> RetentionReport:
    return retain(storage, run=RUN, incarnation=1, policy=policy, ambient=SystemAmbient(), known=known)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "policy", [keep(last=2), keep(last=2, best=("loss", "min")), None], ids=["last", "best", "all"]
)
def test_retention_that_remembers_does_as_one_that_reads_all_anew(policy: Keep | None, change: str) -> None:
    """Spec: C12.4"""
    found = []
    for known in (Known(), None):
        storage = MemoryStorage()
        begin(storage)
        told = []
        for step in (1, 2, 3, 4, 5):
            write_generation(storage, step, chain=CHAIN, metrics={"loss": encode_plain(float(step))})
            told.append(retained(storage, known, policy))
            if step == 3:
                CHANGES[change](storage)
        found.append((told, folders(storage), sorted(everything(storage))))
    assert found[0] == found[1]


def test_a_claim_that_is_refused_later_is_seen_by_who_knew_it_open() -> None:
    storage = MemoryStorage()
    begin(storage)
    write_incarnation(storage, 2)
    known = Known()
    assert read_lineage(storage, known=known.incarnations).owner == 2
    refuse(storage)
    assert read_lineage(storage, known=known.incarnations).owner == 1


def test_a_manifest_is_decoded_again_where_its_bytes_are_others() -> None:
    storage, manifests, path = MemoryStorage(), Manifests(), generation_path(named(1), MANIFEST)
    begin(storage)
    write_generation(storage, 1, chain=CHAIN)
    first = manifests.read(storage, named(1))
    assert manifests.read(storage, named(1)) is first
    data = storage.read(path, limit_bytes=1 << 20)
    flip(storage, path)
    with pytest.raises(CorruptionError):
        manifests.read(storage, named(1))
    storage.delete(path)
    with pytest.raises(ObjectMissingError):
        manifests.read(storage, named(1))
    rewrite(storage, path, data)
    assert manifests.read(storage, named(1)) == first
    manifests.forget_all_but([named(2)])
    assert manifests.read(storage, named(1)) is not first


def test_marks_and_folders_that_older_starts_left_are_work_for_a_sweep() -> None:
    storage = MemoryStorage()
    begin(storage)
    write_generation(storage, 1, chain=CHAIN)
    assert not may_sweep(storage, 1)
    storage.make_folder(generation_path(named(2)))
    assert not may_sweep(storage, 1) and may_sweep(storage, 2)
    storage.delete_folder(generation_path(named(2)))
    storage.put(generation_path(named(1), "deleted.json"), b"whatever it says")
    assert may_sweep(storage, 1)
    assert [entry.text for entry in examine_all(storage, read_lineage(storage))] == [named(1)]
