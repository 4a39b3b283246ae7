"""Ranks that save together: one checkpoint, each thing in it once, and the same word for all."""

from __future__ import annotations

import errno

import pytest

from safepoint.errors import AbortedError, RequestError
from safepoint.faults.script import Effect, Fault, FaultScript
from safepoint.faults.storage import FaultyStorage
from safepoint.format.manifest import Manifest
from safepoint.format.state_digest import joint_digest, rank_share
from safepoint.restoring.select import Wish
from safepoint.retention.policy import keep
from safepoint.schedule import every
from safepoint.storage.memory import MemoryStorage
from tests.saving.ranks.job import (
    DEADLINE_S,
    Held,
    Holding,
    Rank,
    Ranks,
    box,
    indexes,
    manifests,
    replicated,
    sharded,
    weights_at,
    whole,
)

WORLDS = (2, 3, 5)


def saved(world_size: int, holds: Holding, *steps: int) -> tuple[Ranks, list[Manifest]]:
    job = Ranks(world_size, holds)
    for outcome in job.run(lambda rank: [rank.save(step) for step in steps]):
        outcome.returned()
    return job, manifests(job.storage)


@pytest.mark.parametrize("holds", [replicated, sharded])
@pytest.mark.parametrize("world_size", WORLDS)
def test_all_ranks_make_one_checkpoint_and_hear_the_same_result(world_size: int, holds: Holding) -> None:
    """Spec: C2.1, C2.2, C7.1"""
    job = Ranks(world_size, holds)
    results = [outcome.returned() for outcome in job.run(lambda rank: [rank.save(10), rank.save(20)])]
    assert results == [results[0]] * world_size
    newest, older = manifests(job.storage)
    assert [one.step for one in (newest, older)] == [20, 10]
    assert newest.world_size == world_size
    assert whole(job.storage, newest, "model", "w") == weights_at(20)
    assert whole(job.storage, older, "model", "w") == weights_at(10)


@pytest.mark.parametrize("world_size", WORLDS)
def test_what_is_equal_is_stored_once_and_what_differs_by_each_rank(world_size: int) -> None:
    """Spec: F7.6, F3.5"""
    job, (manifest,) = saved(world_size, replicated, 10)
    assert {name: item.kind for name, item in manifest.items.items()} == {
        "model": "replicated",
        "schedule": "global",
        "rng": "per_rank",
    }
    found = indexes(job.storage, manifest)
    assert [sorted(index.items) for index in found] == [["model", "rng", "schedule"]] + [["rng"]] * (world_size - 1)
    assert [index.items["rng"].plain["seed"] for index in found] == list(range(world_size))


@pytest.mark.parametrize("world_size", WORLDS)
def test_replicated_tensors_are_divided_evenly_and_sharded_ones_written_by_their_holders(world_size: int) -> None:
    """Spec: C2.1"""
    for holds, kind in ((replicated, "replicated"), (sharded, "sharded")):
        job, (manifest,) = saved(world_size, holds, 10)
        sizes = [sum(t.shape[0] for t in index.tensors) for index in indexes(job.storage, manifest)]
        assert sum(sizes) == 96
        assert max(sizes) <= 1.1 * 96 / world_size + 1
        assert manifest.items["model"].kind == kind
        assert (manifest.items["model"].tensors, manifest.items["model"].size_bytes) == (1, 96)


@pytest.mark.parametrize("holds", [replicated, sharded])
def test_an_item_s_digest_is_that_of_its_indexes(holds: Holding) -> None:
    """Spec: F7.5"""
    job, (manifest,) = saved(3, holds, 10)
    for name, item in manifest.items.items():
        listing = [index for index in indexes(job.storage, manifest) if name in index.items]
        shares = []
        for index in indexes(job.storage, manifest):
            tree = (index.items[name].plain,) if name in index.items else None
            boxes = [tensor for tensor in index.tensors if tensor.item == name]
            own = index.rank if item.kind == "per_rank" else None
            tree_of = index.rank if len(listing) > 1 else None
            shares.append(rank_share(tree, boxes, tree_of=tree_of, boxes_of=own))
        assert item.digest == joint_digest(item.type, shares)


def test_each_rank_stores_its_own_tensors_of_an_item_that_differs() -> None:
    """Spec: F7.6"""

    def holds(rank: int, world_size: int, step: int) -> list[Held]:
        return [Held("own", "stateful", None, [box("t", bytes([rank] * 8), 0, 8)])]

    job, (manifest,) = saved(3, holds, 10)
    assert manifest.items["own"].kind == "per_rank"
    assert (manifest.items["own"].tensors, manifest.items["own"].size_bytes) == (3, 24)
    assert [[t.shape for t in index.tensors] for index in indexes(job.storage, manifest)] == [[(8,)]] * 3


def test_an_item_of_some_ranks_only_is_stored_by_those() -> None:
    """A stage of a pipeline holds tensors that no other rank has.

    Spec: F3.5
    """

    def holds(rank: int, world_size: int, step: int) -> list[Held]:
        own = Held("model", "module", {"stage": rank}, [box(f"w{rank}", weights_at(rank), 0, 96)])
        return [own] if rank else [own, Held("head", "module", None, [box("h", b"abcd", 0, 4)])]

    job, (manifest,) = saved(3, holds, 10)
    assert manifest.items["model"].kind == "replicated"
    assert manifest.items["model"].tensors == 3
    assert {name: item.ranks for name, item in manifest.items.items()} == {"model": None, "head": (0,)}
    found = indexes(job.storage, manifest)
    assert [sorted(index.items) for index in found] == [["head", "model"], ["model"], ["model"]]
    assert [whole(job.storage, manifest, "model", f"w{rank}") for rank in range(3)] == [weights_at(r) for r in range(3)]


@pytest.mark.parametrize("says_so", [{0, 1, 2}, {0}, {2}])
def test_a_distributed_tensor_that_one_rank_holds_whole_and_others_not_at_all_is_no_rank_s_own(
    says_so: set[int],
) -> None:
    """Spec: F7.1, F7.6"""

    def holds(rank: int, world_size: int, step: int) -> list[Held]:
        tensors = [box("t", b"abcd", 0, 4)] if rank == 1 else []
        return [Held("own", "plain", {"of": "t"}, tensors, "in rows" if rank in says_so else ""), Held("b", "plain")]

    job, (manifest,) = saved(3, holds, 10)
    assert (manifest.items["own"].kind, manifest.items["b"].kind) == ("replicated", "global")
    found = indexes(job.storage, manifest)
    assert ["own" in index.items for index in found] == [True, False, False]
    assert whole(job.storage, manifest, "own", "t") == b"abcd"
    assert manifest.mesh == {"own": ["in rows"] if len(says_so) == 3 else ["", "in rows"]}


def test_a_rank_with_an_empty_part_takes_part() -> None:
    """Spec: C2.1"""

    def holds(rank: int, world_size: int, step: int) -> list[Held]:
        start, stop = [(0, 5), (5, 8), (8, 8)][rank]
        empty = Held("empty", "module", None, [box("e", b"", 0, 0)])
        return [Held("model", "module", None, [box("w", b"12345678", start, stop)]), empty]

    job, (manifest,) = saved(3, holds, 10)
    assert whole(job.storage, manifest, "model", "w") == b"12345678"
    assert [[(t.item, t.shape) for t in i.tensors] for i in indexes(job.storage, manifest)] == [
        [("empty", (0,)), ("model", (5,))],
        [("model", (3,))],
        [],
    ]


def test_ranks_at_different_steps_save_nothing_and_each_is_told_who_is_where() -> None:
    """Spec: C2.2"""
    job = Ranks(3)
    steps = {0: 10, 1: 10, 2: 11}
    outcomes = job.run(lambda rank: rank.save(steps[rank.thread.rank]))
    assert manifests(job.storage) == []
    for outcome in outcomes:
        assert isinstance(outcome.error, AbortedError)
        assert (outcome.error.where, outcome.error.found) == ("rank 2", "step 11")
        assert outcome.error.expected == "step 10, as on rank 0"


def test_a_rank_that_missed_saves_takes_part_in_the_next_one() -> None:
    """Spec: C2.2"""
    job = Ranks(3)

    def act(rank: Rank) -> object:
        if rank.thread.rank == 2:
            rank.thread.ambient.sleep(2.5 * DEADLINE_S)
            return [], rank.save(30)
        return [rank.try_to_save(10), rank.try_to_save(20)], rank.save(30)

    returned = [outcome.returned() for outcome in job.run(act)]
    assert [one.step for one in manifests(job.storage)] == [30]
    for missed, _ in returned[:2]:  # type: ignore[misc]
        assert [type(error) for error in missed] == [AbortedError] * 2
        assert "rank 2" in str(missed[0])


def test_a_rank_that_missed_a_save_and_is_early_for_the_next_one_waits_for_it() -> None:
    """Spec: C2.2"""
    job = Ranks(3)

    def act(rank: Rank) -> object:
        if rank.thread.rank == 2:
            rank.thread.ambient.sleep(2 * DEADLINE_S)
            return rank.save(30)
        assert isinstance(rank.try_to_save(10), AbortedError)
        rank.thread.ambient.sleep(2.5 * DEADLINE_S)
        return rank.save(30)

    for outcome in job.run(act):
        outcome.returned()
    assert [one.step for one in manifests(job.storage)] == [30]


def test_a_leader_that_missed_a_save_leads_the_next_one() -> None:
    """Spec: C2.2"""
    job = Ranks(3)

    def act(rank: Rank) -> object:
        missed = rank.try_to_save(10) if rank.thread.rank else None
        if not rank.thread.rank:
            rank.thread.ambient.sleep(3.5 * DEADLINE_S)
        return missed, rank.save(20)

    returned = [outcome.returned() for outcome in job.run(act)]
    assert [one.step for one in manifests(job.storage)] == [20]
    assert all(isinstance(missed, AbortedError) for missed, _ in returned[1:])  # type: ignore[misc]


@pytest.mark.parametrize("failing", [0, 2])
def test_a_rank_that_cannot_capture_its_state_is_named_on_all_and_nothing_is_made(failing: int) -> None:
    """Spec: C2.2"""

    def holds(rank: int, world_size: int, step: int) -> list[Held]:
        if rank == failing and step == 10:
            raise RequestError("a value cannot be stored", where="model.weight")
        return replicated(rank, world_size, step)

    job = Ranks(3, holds)
    for outcome in job.run(lambda rank: (rank.try_to_save(10), rank.save(20))):
        error, _ = outcome.returned()  # type: ignore[misc]
        assert isinstance(error, RequestError)
        assert "model.weight" in str(error)
        assert f"rank {failing}" in str(error) or failing == 0
    assert [one.step for one in manifests(job.storage)] == [20]


def test_different_objects_under_one_name_are_refused_by_name() -> None:
    def holds(rank: int, world_size: int, step: int) -> list[Held]:
        return [Held("model", "module" if rank else "optimizer", None, [box("w", b"1234", 0, 4)])]

    for outcome in Ranks(2, holds).run(lambda rank: rank.save(10)):
        assert isinstance(outcome.error, AbortedError)
        assert outcome.error.where == "model"


@pytest.mark.parametrize(
    "bounds", [((0, 3), (4, 8)), ((0, 5), (4, 8)), ((0, 4), (4, 7))], ids=["gap", "overlap", "end"]
)
def test_parts_that_do_not_make_a_whole_abort_before_anything_is_written(bounds: tuple[tuple[int, int], ...]) -> None:
    """Spec: C5.1"""

    def holds(rank: int, world_size: int, step: int) -> list[Held]:
        return [Held("model", "module", None, [box("w", b"12345678", *bounds[rank])])]

    job = Ranks(2, holds)
    for outcome in job.run(lambda rank: rank.save(10)):
        assert isinstance(outcome.error, AbortedError)
        assert outcome.error.where == "model/w"
    assert job.storage.list("generations") == []


def test_only_the_leader_deletes_and_keeps_a_journal() -> None:
    """Spec: C1.9"""
    job = Ranks(2, keeps=keep(last=2))
    for outcome in job.run(lambda rank: [rank.save(step) for step in range(10, 60, 10)]):
        outcome.returned()
    assert [one.step for one in manifests(job.storage)] == [50, 40]
    assert [entry.name for entry in job.storage.list("journal")] == ["000001.jsonl"]


def test_words_of_earlier_saves_do_not_stay_on_the_board() -> None:
    job = Ranks(3)
    for outcome in job.run(lambda rank: [rank.save(step) for step in range(1, 20)]):
        outcome.returned()
    held = list(job.threads.messages.held)
    assert {key.split("/")[1] for key in held if key.startswith("save/")} == {manifests(job.storage)[0].generation}
    assert {key.split("/")[2] for key in held if key.startswith("plan/")} == {"18"}


def test_words_of_earlier_joins_do_not_stay_on_the_board() -> None:
    job = Ranks(3)

    def act(rank: Rank) -> None:
        for _ in range(4):
            rank.membership.leave()
            rank.start()
            rank.membership._look_back(Wish())

    for outcome in job.run(act):
        outcome.returned()
    held = {key.split("/")[1] for key in job.threads.messages.held if key.startswith("join/")}
    assert held == {"attempt-5", "5", "look-4"}


def test_a_save_by_time_is_due_on_all_ranks_when_it_is_on_the_leader_s_clock() -> None:
    job = Ranks(3, schedule=every(minutes=1))

    def act(rank: Rank) -> list[int]:
        saved_at = []
        for step in range(1, 400):
            rank.thread.ambient.sleep(0.5 + 0.01 * rank.thread.rank)
            if rank.saver.take_due(step, incarnation=lambda: 1) is not None:
                rank.save(step)
                saved_at.append(step)
        return saved_at

    steps = [outcome.returned() for outcome in job.run(act)]
    assert steps == [steps[0]] * 3
    assert 2 <= len(steps[0]) <= 4  # type: ignore[arg-type]


def test_a_failure_on_one_rank_leaves_the_schedule_of_all_alike() -> None:
    def holds(rank: int, world_size: int, step: int) -> list[Held]:
        if rank == 1 and step == 10:
            raise ZeroDivisionError("an object cannot tell its state")
        return replicated(rank, world_size, step)

    job = Ranks(3, holds, schedule=every(updates=10))

    def act(rank: Rank) -> list[int]:
        tried = []
        for step in range(1, 25):
            if rank.saver.take_due(step, incarnation=lambda: 1) is not None:
                tried.append(step)
                rank.try_to_save(step)
        return tried

    for outcome in job.run(act):
        assert outcome.returned() == [10, 20]
    assert [one.step for one in manifests(job.storage)] == [20]


@pytest.mark.parametrize("rank", range(3))
def test_the_failure_of_a_background_save_is_met_by_all_ranks_at_the_same_boundary(rank: int) -> None:
    storage = MemoryStorage()
    full = Fault(Effect.FAIL, verb="create", path="*000010*.safetensors", errno=errno.ENOSPC)
    job = Ranks(3, storage=storage, storages={rank: FaultyStorage(storage, FaultScript((full,)))}, is_background=True)

    def act(own: Rank) -> int:
        own.save(10)
        for _ in range(20):
            own.thread.ambient.sleep(1.0)
            own.saver.raise_owed(waits=False)
        with pytest.raises(AbortedError, match="disk is full"):
            own.saver.raise_owed(waits=True, is_explicit=True)
        own.save(20)
        own.saver.raise_owed(waits=True, is_explicit=True)
        return 20

    assert [outcome.returned() for outcome in job.run(act)] == [20, 20, 20]
    assert [one.step for one in manifests(storage)] == [20]


def test_a_folder_that_is_not_shared_is_found_at_the_start_and_the_ranks_are_named() -> None:
    """Spec: C1.9"""
    job = Ranks(4, storages={1: MemoryStorage(), 3: MemoryStorage()})
    for outcome in job.run(lambda rank: None):
        assert isinstance(outcome.error, RequestError)
        assert "rank 1 sees no incarnations/000001.json, rank 3 sees no" in str(outcome.error)
        assert "rank 2" not in str(outcome.error)
    assert [entry.name for entry in job.storage.list("incarnations") if "refused" in entry.name]
