"""Kinds that a job declares: they win over what a save finds, and what contradicts them is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import safepoint as sp
from safepoint.errors import AbortedError, ContractError, RequestError, SafepointError
from safepoint.format.manifest import Manifest, ProgressRecord
from safepoint.saving.background import SaveHandle
from safepoint.saving.capture import Snapshot, capture
from safepoint.state.registry import Registry
from safepoint.storage.memory import MemoryStorage
from tests.crash.job import CONDITIONS
from tests.restoring.ranks.jobs import same
from tests.saving.ranks.job import Held, Rank, Ranks, box, manifests, weights_at

WORLD = 3


def saved(
    plain: list[Any], kinds: list[dict[str, str]], *, type_name: str = "plain", is_cut: bool = False
) -> tuple[list[SafepointError | None], list[Manifest]]:
    """Save one item on all ranks; return each rank's error, and what was committed."""
    job = Ranks(WORLD)

    def act(rank: Rank) -> SafepointError | None:
        number = rank.thread.rank
        length = WORLD * 4
        start, stop = (number * 4, number * 4 + 4) if is_cut else (0, length)
        held = Held("table", type_name, plain[number], [box("w", weights_at(5, length), start, stop)])
        return failure(rank, held, kinds[number])

    return [outcome.returned() for outcome in job.run(act)], manifests(job.storage)  # type: ignore[misc]


def failure(rank: Rank, held: Held, kinds: dict[str, str]) -> SafepointError | None:
    """Save one item on one rank; return the error."""
    items = capture([held])  # type: ignore[list-item]
    progress = ProgressRecord(5, 5, 5, 0, 0, 0)
    snapshot = Snapshot(progress, items, CONDITIONS, {}, None, "exact", kinds=kinds)
    try:
        rank.saver.save(rank.membership.require(), lambda: snapshot, SaveHandle(is_explicit=True))
    except SafepointError as exc:
        return exc
    return None


@pytest.mark.parametrize(
    ("declared", "plain", "type_name", "is_cut", "found"),
    [
        ("", [1, 1, 1], "plain", False, "global"),
        ("", [1, 1, 2], "plain", False, "per_rank"),
        ("per_rank", [1, 1, 1], "plain", False, "per_rank"),
        ("per_rank", [1, 1, 2], "plain", False, "per_rank"),
        ("replicated", [1, 1, 1], "plain", False, "global"),
        ("replicated", [1, 1, 1], "module", False, "replicated"),
        ("sharded", [1, 1, 1], "module", True, "sharded"),
    ],
)
def test_a_declared_kind_wins_over_the_one_that_is_found(
    declared: str, plain: list[int], type_name: str, is_cut: bool, found: str
) -> None:
    """Spec: F7.6"""
    kinds = {"table": declared} if declared else {}
    errors, (manifest,) = saved(plain, [kinds] * WORLD, type_name=type_name, is_cut=is_cut)
    assert errors == [None] * WORLD and manifest.items["table"].kind == found


@pytest.mark.parametrize(
    ("kinds", "plain", "type_name", "is_cut", "told"),
    [
        (["replicated"] * WORLD, [1, 2, 1], "plain", False, "another state on rank 1 than on rank 0"),
        (["replicated"] * WORLD, [1, 1, 1], "module", True, "found sharded"),
        (["per_rank"] * WORLD, [1, 1, 1], "module", False, "found replicated"),
        (["per_rank"] * WORLD, [1, 1, 1], "plain", True, "found sharded"),
        (["sharded"] * WORLD, [1, 1, 1], "module", False, "found replicated"),
        (["per_rank", "", ""], [1, 1, 1], "plain", False, "per_rank on rank 0, none on rank 1"),
    ],
)
def test_what_contradicts_a_declared_kind_is_refused_by_name_on_all_ranks(
    kinds: list[str], plain: list[int], type_name: str, is_cut: bool, told: str
) -> None:
    """Spec: F7.6"""
    declared = [{"table": kind} if kind else {} for kind in kinds]
    errors, committed = saved(plain, declared, type_name=type_name, is_cut=is_cut)
    assert committed == [] and same([str(error) for error in errors])
    assert isinstance(errors[0], AbortedError) and told in str(errors[0]) and errors[0].where == "table"


@pytest.mark.parametrize(
    ("type_name", "plain", "names"),
    [("plain", [1, 1, 2], ["w", "w", "w"]), ("module", [1, 1, 1], ["w", "w", "v"])],
    ids=["a dict with distributed tensors, another value", "a module, another tensor"],
)
def test_ranks_that_hold_other_values_or_tensors_are_not_replicas(
    type_name: str, plain: list[int], names: list[str]
) -> None:
    """Spec: F7.6"""
    job = Ranks(WORLD)

    def act(rank: Rank) -> list[SafepointError | None]:
        number = rank.thread.rank
        tensors = [box(names[number], weights_at(5), 0, len(weights_at(5)))]
        held = Held("table", type_name, plain[number], tensors, division="replicate")
        return [failure(rank, held, kinds) for kinds in ({}, {"table": "replicated"})]

    for undeclared, error in (outcome.returned() for outcome in job.run(act)):  # type: ignore[misc]
        assert undeclared is None and isinstance(error, AbortedError)
        assert "another state on rank 2 than on rank 0" in str(error)
    assert len(manifests(job.storage)) == 1


@pytest.mark.parametrize("type_name", ["plain", "module"])
def test_what_only_some_ranks_have_is_no_replica_on_all(type_name: str) -> None:
    """Spec: F7.6"""
    job = Ranks(WORLD)

    def act(rank: Rank) -> SafepointError | None:
        held = Held("table", type_name, 1, [box("w", weights_at(5), 0, len(weights_at(5)))])
        other = Held("other", "plain", 1)
        return failure(rank, held if rank.thread.rank == 0 else other, {"table": "replicated"})

    errors = [outcome.returned() for outcome in job.run(act)]
    assert manifests(job.storage) == [] and same([str(error) for error in errors])
    assert isinstance(errors[0], AbortedError) and errors[0].where == "table"
    assert "another state on rank 1, 2 than on rank 0" in str(errors[0])


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_do_not_agree_whose_a_buffer_is_save_nothing(rank: int) -> None:
    """Spec: C5.4"""
    job = Ranks(2)

    def act(one: Rank) -> SafepointError | None:
        number = one.thread.rank
        tensors = [box("b", weights_at(5), 0, len(weights_at(5)), is_leaders=number == rank)]
        return failure(one, Held("table", "module", 1, tensors), {})

    errors = [outcome.returned() for outcome in job.run(act)]
    assert manifests(job.storage) == [] and same([str(error) for error in errors])
    assert isinstance(errors[0], AbortedError) and errors[0].where == "table/b"
    assert f"as on rank {rank}" in str(errors[0]) and f"on rank {1 - rank}" in str(errors[0])


def test_a_tensor_whose_name_is_no_text_is_refused_by_its_path() -> None:
    held = Held("table", "plain", 1, [box("a/\ud800b", weights_at(5), 0, len(weights_at(5)))])
    with pytest.raises(RequestError, match=r"not Unicode text.*table/a/\\ud800b"):
        capture([held])  # type: ignore[list-item]


def test_an_optimizer_that_has_made_no_step_is_no_contradiction_to_parts() -> None:
    """Spec: F7.6"""
    job = Ranks(WORLD)
    held = Held("table", "optimizer", {"state": {}})
    errors = [outcome.returned() for outcome in job.run(lambda rank: failure(rank, held, {"table": "sharded"}))]
    assert errors == [None] * WORLD and len(manifests(job.storage)) == 1


def test_an_object_is_registered_with_its_kind_and_a_module_is_no_ranks_own() -> None:
    registry, noise = Registry(), torch.Generator()
    registry.add("noise", sp.per_rank(noise))
    registry.add("table", sp.replicated({"a": 1}))
    assert registry.objects["noise"] is noise and registry.kinds == {"noise": "per_rank", "table": "replicated"}
    assert registry.each_ranks_own == {"noise"}
    registry.remove("noise")
    assert registry.each_ranks_own == frozenset()
    with pytest.raises(RequestError, match="never each rank's own"):
        registry.add("model", sp.per_rank(torch.nn.Linear(1, 1)))
    with pytest.raises(RequestError, match="declared twice"):
        registry.add("twice", sp.replicated(sp.per_rank(noise)))
    assert set(registry.items) == {"rng", "table"}


def saved_by_two() -> MemoryStorage:
    """Return a run with a checkpoint of two ranks, whose dict was the same on both, though nobody declared it."""

    def act(rank: Rank) -> None:
        rank.save(10)

    job = Ranks(2, lambda rank, world_size, step: [Held("table", "plain", {"class": "dict", "state": {"a": 1}})])
    for outcome in job.run(act):
        outcome.returned()
    assert isinstance(job.storage, MemoryStorage)
    return job.storage


def test_what_is_declared_to_be_each_ranks_own_is_not_given_to_others_though_it_was_equal() -> None:
    """Spec: C11.6"""
    storage = saved_by_two()

    def manager(state: dict[str, object], permits: frozenset[str] = frozenset()) -> sp.CheckpointManager:
        asked = sp.Contract("approximate", {"rng.added"} | permits)
        return sp.CheckpointManager("memory://run", state, contract=asked, storage=storage, takeover=True)

    with manager({"table": (table := {"a": 0})}) as one:
        assert one.restore().step == 10 and table == {"a": 1}
    with manager({"table": sp.per_rank({"a": 0})}) as one, pytest.raises(ContractError, match=r"'table\.per_rank'"):
        one.restore()
    with manager({"table": sp.per_rank(table := {"a": 0})}, frozenset({"table.per_rank"})) as one:
        assert one.restore().step == 10 and table == {"a": 0}


def test_a_late_item_that_is_declared_to_be_each_ranks_own_is_refused_in_the_same_way() -> None:
    """Spec: C11.6"""
    storage = saved_by_two()
    contract = sp.Contract("approximate", {"rng.added"})
    with sp.CheckpointManager("memory://run", {}, contract=contract, storage=storage, takeover=True) as manager:
        manager.restore(late={"table"})
        with pytest.raises(ContractError, match=r"'table\.per_rank'"):
            manager.register("table", sp.per_rank({"a": 0}))
        manager.register("table", table := {"a": 0})
        assert table == {"a": 1}
