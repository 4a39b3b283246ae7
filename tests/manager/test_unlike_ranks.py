"""Ranks that are unlike: other threads, other stages with settings of their own. Each is compared with what it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import safepoint as sp
from safepoint.ambient import Ambient
from safepoint.group.base import Group
from safepoint.storage.memory import MemoryStorage
from safepoint.testing.ranks import RankThread, RankThreads
from tests.saving.ranks.job import manifests

Build = Callable[[int], dict[str, object]]
Act = Callable[[sp.CheckpointManager, dict[str, Any]], object]
Job = Callable[..., list[Any]]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """Return what lets ranks make a manager each, restore, and act; it returns what they returned or raised."""
    groups: dict[int, Group] = {}

    def find(*, ambient: Ambient, **_: object) -> Group:
        return groups[ambient.pid()]

    monkeypatch.setattr("safepoint.manager.find_group", find)

    def run(
        storage: MemoryStorage,
        build: Build,
        act: Act,
        *,
        threads: Sequence[int] = (1, 1),
        permit: Sequence[object] = (),
    ) -> list[Any]:
        def body(rank: RankThread) -> object:
            # The number is that of the calling thread alone, once the thread has asked for it.
            torch.get_num_threads()
            torch.set_num_threads(threads[rank.rank])
            groups[rank.ambient.pid()] = rank.group
            state = build(rank.rank)
            contract = sp.Contract(permit={"data_position", *permit})  # type: ignore[arg-type]
            manager = sp.CheckpointManager(
                "memory://x", state, storage=storage, ambient=rank.ambient, contract=contract, takeover=True
            )
            with manager:
                manager.restore()
                return act(manager, state)

        ended = RankThreads(len(threads)).run(body)
        return [one.value if one.error is None else one.error for one in ended]

    before = torch.get_num_threads()
    yield run
    torch.set_num_threads(before)


def plain(rank: int) -> dict[str, object]:
    return {"table": {"a": 1}}


def save(manager: sp.CheckpointManager, state: dict[str, Any]) -> None:
    manager.after_update(samples=1)
    manager.save()


def told(report: sp.RestoreReport, word: str) -> set[tuple[str, str, str]]:
    return {(one.subject, one.saved, one.current) for one in report.reasons if one.word == word}


def restored(manager: sp.CheckpointManager, state: dict[str, Any]) -> sp.RestoreReport:
    return manager.restore()


def test_a_rank_is_compared_with_the_environment_that_it_had_itself(job: Job) -> None:
    """Spec: F7.8"""
    storage = MemoryStorage()
    assert job(storage, plain, save, threads=(1, 2)) == [None, None]
    (manifest,) = manifests(storage)
    assert manifest.conditions.environment["threads"] == "1"
    ((ranks, environment),) = [(one.ranks, one.environment) for one in manifest.conditions.ranks or ()]
    assert (ranks, environment) == ((1,), {"threads": "2"})

    for report in job(storage, plain, restored, threads=(1, 2)):
        assert report.step == 1 and told(report, "device") == set()
    errors = job(storage, plain, restored, threads=(2, 1))
    assert [type(one) for one in errors] == [sp.ContractError] * 2
    swapped = {("threads (rank 0)", "1", "2"), ("threads (rank 1)", "2", "1")}
    for error in errors:
        assert {(one.subject, one.saved, one.current) for one in error.differences} == swapped
    for report in job(storage, plain, restored, threads=(2, 1), permit=["device"]):
        assert told(report, "device") == swapped


def test_on_another_number_of_ranks_what_any_rank_had_is_no_difference(job: Job) -> None:
    """Spec: F7.8"""
    storage = MemoryStorage()
    job(storage, plain, save, threads=(1, 2))
    fewer = ["world_size", "device"]
    for threads, expected in ((1, set()), (2, set()), (3, {("threads", "1 or 2", "3")})):
        (report,) = job(storage, plain, restored, threads=(threads,), permit=fewer)
        assert isinstance(report, sp.RestoreReport) and told(report, "device") == expected


class Stage(torch.nn.Module):
    """One stage of a pipeline: its layer has a name of its own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        setattr(self, name, torch.nn.Linear(2, 1))


def stages(*rates: float) -> Build:
    """Return what gives rank r stage r, with an optimizer of its learning rate."""

    def build(rank: int) -> dict[str, object]:
        torch.manual_seed(0)
        model = Stage(f"layer{rank}")
        return {"model": model, "opt": torch.optim.SGD(model.parameters(), lr=rates[rank], momentum=0.5)}

    return build


def step(manager: sp.CheckpointManager, state: dict[str, Any]) -> None:
    """Make an update with a gradient of ones, and save."""
    for parameter in state["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    state["opt"].step()
    save(manager, state)


def rate(manager: sp.CheckpointManager, state: dict[str, Any]) -> float:
    return float(state["opt"].param_groups[0]["lr"])


def test_the_settings_of_each_stages_optimizer_are_compared_and_restored_on_its_rank(job: Job) -> None:
    """Spec: F7.8"""
    storage = MemoryStorage()
    assert job(storage, stages(0.1, 0.2), step) == [None, None]
    (manifest,) = manifests(storage)
    assert [one.ranks for one in manifest.conditions.ranks or ()] == [(1,)]

    assert job(storage, stages(0.1, 0.2), rate) == [0.1, 0.2]
    for rates, subject, saved, now in (
        ((0.1, 0.3), "opt configuration settings.groups[0].options.lr (rank 1)", "0.2", "0.3"),
        ((0.3, 0.2), "opt configuration settings.groups[0].options.lr (rank 0)", "0.1", "0.3"),
    ):
        errors = job(storage, stages(*rates), rate)
        assert [type(one) for one in errors] == [sp.ContractError] * 2
        (difference,) = errors[0].differences
        assert (difference.word, difference.subject) == ("opt.lr", subject)
        assert (difference.saved, difference.current) == (saved, now)
    assert job(storage, stages(0.1, 0.3), rate, permit=["opt.lr"]) == [0.1, 0.3]
    assert job(storage, stages(0.1, 0.3), rate, permit=[sp.permit("opt.lr", keep="saved")]) == [0.1, 0.2]


def dropping(*rates: float) -> Build:
    """Return what gives rank r stage r, and a dropout of its rate, which is no part of any state."""

    def build(rank: int) -> dict[str, object]:
        model = Stage(f"layer{rank}")
        model.drop = torch.nn.Dropout(rates[rank])
        return {"model": model}

    return build


def test_the_structure_of_each_stage_is_compared_with_what_it_was_on_its_rank(job: Job) -> None:
    """Spec: F7.8"""
    storage = MemoryStorage()
    assert job(storage, dropping(0.1, 0.2), save) == [None, None]
    for report in job(storage, dropping(0.1, 0.2), restored):
        assert report.step == 1 and told(report, "model.structure") == set()
    for rates, rank in (((0.1, 0.3), 1), ((0.3, 0.2), 0)):
        errors = job(storage, dropping(*rates), restored)
        assert [type(one) for one in errors] == [sp.ContractError] * 2
        subjects = [(one.word, one.subject) for one in errors[0].differences]
        assert subjects == [("model.structure", f"structure of 'model' (rank {rank})")]
    for report in job(storage, dropping(0.1, 0.3), restored, permit=["model.structure"]):
        assert [one.level for one in report.reasons if one.word == "model.structure"] == ["same_data"]


def test_the_settings_of_an_optimizer_that_only_one_rank_has_are_compared_there(job: Job) -> None:
    """Spec: F7.8"""

    def named(*rates: float) -> Build:
        def build(rank: int) -> dict[str, object]:
            held = stages(*rates)(rank)
            return {f"model{rank}": held["model"], f"opt{rank}": held["opt"]}

        return build

    def act(manager: sp.CheckpointManager, state: dict[str, Any]) -> Any:
        (name,) = [name for name in state if name.startswith("opt")]
        return state[name].param_groups[0]["lr"]

    storage = MemoryStorage()
    assert job(storage, named(0.1, 0.2), save) == [None, None]
    assert job(storage, named(0.1, 0.2), act) == [0.1, 0.2]
    errors = job(storage, named(0.1, 0.3), act)
    assert [type(one) for one in errors] == [sp.ContractError] * 2
    assert [(one.word, one.saved, one.current) for one in errors[0].differences] == [("opt1.lr", "0.2", "0.3")]
    assert job(storage, named(0.1, 0.3), act, permit=["opt1.lr"]) == [0.1, 0.3]


def test_on_one_process_each_stage_keeps_the_settings_of_its_optimizer(job: Job) -> None:
    """Spec: C11.10"""
    storage = MemoryStorage()
    job(storage, stages(0.1, 0.2), step)
    saved = job(storage, stages(0.1, 0.2), lambda manager, state: [one.clone() for one in state["model"].parameters()])

    def whole(rank: int) -> dict[str, object]:
        model = Stage("layer0")
        model.layer1 = torch.nn.Linear(2, 1)
        # In another order than that of the stages.
        groups = [
            {"params": layer.parameters(), "lr": rate} for layer, rate in ((model.layer1, 0.2), (model.layer0, 0.1))
        ]
        return {"model": model, "opt": torch.optim.SGD(groups, lr=1.0, momentum=0.5)}

    def act(manager: sp.CheckpointManager, state: dict[str, Any]) -> Any:
        return state

    permit = ["world_size", "model.structure", "opt.groups"]
    (state,) = job(storage, whole, act, threads=(1,), permit=permit)
    assert [group["lr"] for group in state["opt"].param_groups] == [0.2, 0.1]
    for number, layer in enumerate((state["model"].layer0, state["model"].layer1)):
        assert all(torch.equal(one, other) for one, other in zip(layer.parameters(), saved[number], strict=True))
    moments = [state["opt"].state[one]["momentum_buffer"] for one in state["model"].parameters()]
    assert all(torch.equal(one, torch.ones_like(one)) for one in moments)
