"""Which generations are on the live lineage, played on runs that were written by hand."""

from __future__ import annotations

import pytest

from safepoint.catalog import GenerationState, Lineage, list_generations, list_incarnations, read_lineage
from safepoint.errors import CorruptionError
from safepoint.format.names import MAX_INCARNATION
from safepoint.format.records import LineageLink
from safepoint.storage.memory import MemoryStorage
from tests import build
from tests.format.sealing import sealed_tree, tree_of
from tests.played import branched, damaged_files, live, resumed, steps, the

FRESH = LineageLink(1, None, 0)


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


def test_an_empty_storage_holds_no_run() -> None:
    assert read_lineage(MemoryStorage()) == Lineage(None)


def test_steps_of_a_branch_that_was_left_are_superseded(storage: MemoryStorage) -> None:
    """Spec: C9.3"""
    branched(storage)
    assert live(storage) == [200, 100, 50]
    assert steps(storage, GenerationState.SUPERSEDED) == [150]


def test_a_late_publish_by_a_fenced_process_is_superseded(storage: MemoryStorage) -> None:
    """Spec: C9.3"""
    first, _ = branched(storage)
    build.write_generation(storage, 300, chain=first)
    assert live(storage) == [200, 100, 50]


def test_the_chain_is_walked_through_several_starts_and_branches(storage: MemoryStorage) -> None:
    """Spec: C9.2, C9.3"""
    first, second = branched(storage)
    third = resumed(second, 3, build.write_generation(storage, 250, chain=second))
    build.write_incarnation(storage, 3, chain=third)
    build.write_generation(storage, 260, chain=third)
    assert live(storage) == [260, 250, 200, 100, 50]
    fourth = resumed(first, 4, build.write_generation(storage, 40, chain=first))
    build.write_incarnation(storage, 4, chain=fourth)
    assert live(storage) == [40]
    build.write_generation(storage, 41, chain=fourth)
    assert live(storage) == [41, 40]


def test_starts_that_recorded_nothing_leave_the_lineage_as_it_is(storage: MemoryStorage) -> None:
    """Spec: C9.2"""
    branched(storage)
    for number in (3, 4, 5):
        build.write_incarnation(storage, number, is_closed=False)
    lineage = read_lineage(storage)
    assert live(storage) == [200, 100, 50]
    assert (lineage.newest, lineage.owner, lineage.chain[-1].incarnation) == (5, 5, 2)


def test_a_refused_start_is_passed_over_and_its_number_stays_taken(storage: MemoryStorage) -> None:
    """Spec: C9.2, C1.3"""
    first, _ = branched(storage)
    name = build.write_generation(storage, 20, chain=first)
    build.write_incarnation(storage, 3, chain=resumed(first, 3, name), is_refused=True)
    lineage = read_lineage(storage)
    assert live(storage) == [200, 100, 50, 20]
    assert (lineage.newest, lineage.owner) == (3, 2)


def test_a_save_in_flight_stays_pending_beside_a_refused_start(storage: MemoryStorage) -> None:
    first, second = branched(storage)
    build.write_generation(storage, 201, chain=second, is_committed=False)
    build.write_generation(storage, 151, chain=first, is_committed=False)
    build.write_incarnation(storage, 3, is_refused=True)
    assert steps(storage, GenerationState.PENDING) == [201]
    assert steps(storage, GenerationState.ABANDONED) == [151]
    build.write_incarnation(storage, 4)
    assert steps(storage, GenerationState.ABANDONED) == [201, 151]


def test_the_lineage_does_not_depend_on_generations_that_were_removed(storage: MemoryStorage) -> None:
    """Spec: C9.3"""
    first = build.begin(storage)
    removed = "step-000000000100-i000001-0badcafe"
    second = resumed(first, 2, removed)
    build.write_incarnation(storage, 2, chain=second)
    build.write_generation(storage, 150, chain=first)
    build.write_generation(storage, 60, chain=first)
    build.write_generation(storage, 200, chain=second)
    assert live(storage) == [200, 60]


def test_names_that_are_not_ours_are_never_read(storage: MemoryStorage) -> None:
    """Spec: F5.4"""
    chain = build.begin(storage)
    build.write_generation(storage, 10, chain=chain)
    for folder in ("999", "step-20", "latest", "step-000000000020-i000001-0badcafe.bak"):
        storage.make_folder(f"generations/{folder}")
        storage.put(f"generations/{folder}/manifest.json", b"not a manifest")
    storage.put("generations/step-000000000030-i000001-0badcafe", b"a file, not a folder")
    storage.put("incarnations/notes.txt", b"x")
    storage.make_folder("incarnations/000007.json")
    assert [name.step for name in list_generations(storage)] == [10]
    assert list_incarnations(storage) == [1]
    assert live(storage) == [10]
    assert read_lineage(storage).damage == ()


def test_steps_are_ordered_as_numbers_and_not_as_text(storage: MemoryStorage) -> None:
    """Spec: C10.1"""
    chain = build.begin(storage)
    for step in (9, 100, 10):
        build.write_generation(storage, step, chain=chain)
    assert live(storage) == [100, 10, 9]


def test_of_two_with_one_step_the_later_comes_first(storage: MemoryStorage) -> None:
    """Spec: C10.1"""
    first = build.begin(storage)
    early = build.write_generation(storage, 100, chain=first, nonce="00ffffff", created="2030-01-01T00:00:00+00:00")
    again = build.write_generation(storage, 100, chain=first, nonce="01000000", created="2001-01-01T00:00:00+00:00")
    second = resumed(first, 2, again)
    build.write_incarnation(storage, 2, chain=second)
    last = build.write_generation(storage, 100, chain=second, nonce="00000000")
    assert [str(name) for name in list_generations(storage)] == [last, again, early]
    assert live(storage) == [100, 100, 100]


def test_a_generation_of_another_run_is_damage(storage: MemoryStorage) -> None:
    """Spec: C8.1"""
    chain = build.begin(storage)
    build.write_generation(storage, 10, chain=chain)
    foreign = build.write_generation(storage, 20, chain=chain, run="ffff")
    assert live(storage) == [10]
    refusal = the(storage, foreign).refusal
    assert refusal is not None and "another run" in refusal.reason


@pytest.mark.parametrize("number", [1, 2])
def test_records_of_different_runs_in_one_folder_are_refused(storage: MemoryStorage, number: int) -> None:
    """Spec: F6.6"""
    build.write_run(storage)
    build.write_incarnation(storage, number, run="ffff")
    with pytest.raises(CorruptionError, match="different runs"):
        read_lineage(storage)


@pytest.mark.parametrize("is_there", [True, False], ids=["damaged", "missing"])
def test_without_the_run_s_record_the_others_tell_its_id(storage: MemoryStorage, is_there: bool) -> None:
    """Spec: F6.6"""
    branched(storage)
    storage.delete("run.json")
    if is_there:
        storage.put("run.json", b"")
    assert read_lineage(storage).run == build.RUN
    assert damaged_files(storage) == {"run.json"}
    assert live(storage) == [200, 100, 50]


def test_without_any_record_the_manifests_tell_run_and_lineage(storage: MemoryStorage) -> None:
    """Spec: F6.6, F6.4, C9.5"""
    branched(storage)
    storage.delete("run.json")
    for entry in storage.list("incarnations"):
        storage.delete(f"incarnations/{entry.name}")
    lineage = read_lineage(storage)
    assert (lineage.run, lineage.newest) == (build.RUN, 2)
    assert live(storage) == [200, 100, 50]
    assert {"run.json", "incarnations/000001.json", "incarnations/000002.json"} <= damaged_files(storage)


@pytest.mark.parametrize("how", ["flipped", "empty", "missing", "exchanged", "of another chain"])
def test_a_lost_resumed_record_is_taken_from_a_manifest_and_named(storage: MemoryStorage, how: str) -> None:
    """Spec: C9.5, F6.3"""
    first, second = branched(storage)
    path = "incarnations/000002.resumed.json"
    if how == "flipped":
        build.flip(storage, path)
    elif how == "empty":
        storage.put(path, b"")
    elif how == "missing":
        storage.delete(path)
    elif how == "exchanged":
        storage.put(path, storage.read("incarnations/000001.resumed.json", limit_bytes=1 << 20))
    else:
        tree = tree_of(storage.read(path, limit_bytes=1 << 20))
        storage.put(path, sealed_tree(tree | {"step": 50}))
    assert read_lineage(storage).chain == second
    assert live(storage) == [200, 100, 50]
    assert path in damaged_files(storage)
    assert first == (FRESH,)


def test_a_damaged_resumed_record_that_no_manifest_replaces_is_an_error(storage: MemoryStorage) -> None:
    """Spec: C9.5"""
    _, second = branched(storage)
    build.write_incarnation(storage, 3, chain=resumed(second, 3, "step-000000000200-i000002-0badcafe"))
    build.flip(storage, "incarnations/000003.resumed.json")
    with pytest.raises(CorruptionError, match=r"000003\.resumed\.json"):
        read_lineage(storage)
    assert read_lineage(storage, needs_chain=False).chain == ()
    build.write_incarnation(storage, 4, chain=resumed(second, 4, "step-000000000200-i000002-0badcafe"))
    assert live(storage) == [200, 100, 50], "a newer record tells the whole chain"


def test_a_damaged_incarnation_record_is_a_taken_number(storage: MemoryStorage) -> None:
    """Spec: F6.4"""
    branched(storage)
    for number, data in ((3, b""), (4, b"{}")):
        storage.publish(f"incarnations/{number:06d}.json", data)
    lineage = read_lineage(storage)
    assert lineage.newest == 4
    assert [entry.record is None for entry in lineage.incarnations] == [False, False, True, True]
    assert damaged_files(storage) == {"incarnations/000003.json", "incarnations/000004.json"}
    assert live(storage) == [200, 100, 50]


def test_a_missing_incarnation_record_keeps_its_number_and_its_chain(storage: MemoryStorage) -> None:
    """Spec: F6.4"""
    branched(storage)
    storage.delete("incarnations/000002.json")
    assert list_incarnations(storage) == [1, 2]
    assert live(storage) == [200, 100, 50]
    assert damaged_files(storage) == {"incarnations/000002.json"}


def test_exchanged_incarnation_records_are_damage(storage: MemoryStorage) -> None:
    """Spec: F6.3"""
    branched(storage)
    one, two = (storage.read(f"incarnations/{number:06d}.json", limit_bytes=1 << 20) for number in (1, 2))
    storage.put("incarnations/000001.json", two)
    storage.put("incarnations/000002.json", one)
    assert damaged_files(storage) == {"incarnations/000001.json", "incarnations/000002.json"}
    assert live(storage) == [200, 100, 50]


def test_a_stray_generation_of_another_run_takes_no_number(storage: MemoryStorage) -> None:
    branched(storage)
    link = LineageLink(MAX_INCARNATION, None, 0)
    build.write_generation(storage, 5, chain=(link,), run="ffff")
    assert read_lineage(storage).newest == 2
