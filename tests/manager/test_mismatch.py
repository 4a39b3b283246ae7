"""What does not fit is refused whole, with every difference, before a single bit of the live state changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import safepoint as sp
from tests.manager.jobs import bits, streams


def two_layers(width: int = 3, *, more: bool = False, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Module()
    model.add_module("first", nn.Linear(2, width))
    model.add_module("second", nn.Linear(3, 2, dtype=dtype))
    if more:
        model.add_module("third", nn.Linear(2, 2))
    return model


class Start:
    """A start whose whole live state can be compared before and after a refusal."""

    def __init__(self, url: Path, model: nn.Module, *, seed: int = 1, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        self.loop = options.pop("loop", {"best": 1.0})
        items = {"model": model, "optimizer": self.optimizer, "loop": self.loop, **options.pop("items", {})}
        for name in options.pop("without", ()):
            del items[name]
        self.manager = sp.CheckpointManager(url, items, **options)

    def live(self) -> object:
        model = bits(dict(self.model.state_dict())), [one.requires_grad for one in self.model.parameters()]
        return model, bits(self.optimizer.state_dict()), dict(self.loop), streams(), self.manager.progress

    def update(self) -> None:
        self.optimizer.zero_grad()
        sum(one.square().sum() for one in self.model.parameters()).backward()  # type: ignore[union-attr]
        self.optimizer.step()
        self.manager.after_update()


@pytest.fixture
def url(tmp_path: Path) -> Path:
    """A run of two updates, with two items besides model and optimizer."""
    job = Start(tmp_path, two_layers(), items={"extra": {"n": 1}})
    job.update()
    job.update()
    job.manager.save()
    job.manager.close()
    return tmp_path


EVERYTHING = {"extra": {"n": 0}}


def refusal(job: Start, **options: Any) -> sp.MismatchError:
    """Return the error of a restore that must touch nothing."""
    before = job.live()
    with pytest.raises(sp.MismatchError) as caught:
        job.manager.restore(**options)
    assert job.live() == before
    return caught.value


def words(error: sp.MismatchError) -> list[str]:
    return sorted({one.word for one in error.differences})


def test_all_differences_are_listed_at_once_and_nothing_is_touched(url: Path) -> None:
    """Field reports B86, B89, B146, B153."""
    job = Start(url, two_layers(4, more=True, dtype=torch.float64), items={"new": [1]}, without=["loop"])

    error = refusal(job)

    assert words(error) == [
        "extra.removed",
        "loop.removed",
        "model.added",
        "model.dtype",
        "model.shape",
        "new.added",
        "optimizer.added",
    ]
    text = str(error)
    for name in ("third.weight", "second.bias", "first.weight", "'extra'", "'loop'", "'new'"):
        assert name in text
    assert "[3, 2]" in text or "(3, 2)" in text
    assert "permit" in text and "skip" in text


@pytest.mark.parametrize(
    "model, word",
    [
        (two_layers(4), "model.shape"),
        (two_layers(more=True), "model.added"),
        (two_layers(dtype=torch.float64), "model.dtype"),
        (nn.ModuleDict({"first": nn.Linear(2, 3)}), "model.removed"),
    ],
)
def test_each_kind_of_difference_of_a_parameter_is_refused_by_its_word(url: Path, model: nn.Module, word: str) -> None:
    assert word in words(refusal(Start(url, model, items=dict(EVERYTHING))))


def test_a_missing_item_is_an_error_unless_it_is_named(url: Path) -> None:
    """Field reports B43, B98, B146."""
    assert words(refusal(Start(url, two_layers(), without=["loop"], items=dict(EVERYTHING)))) == ["loop.removed"]

    contract = sp.Contract(level="approximate", permit={"loop.removed"})
    job = Start(url, two_layers(), without=["loop"], items=dict(EVERYTHING), contract=contract)
    report = job.manager.restore()
    assert report.step == 2
    assert [one.word for one in report.reasons] == ["loop.removed"]
    job.manager.close()


def test_skipped_items_stay_as_they_are_and_are_reported(url: Path) -> None:
    job = Start(url, two_layers(), items=dict(EVERYTHING), loop={"best": 7.0})
    before = bits(job.optimizer.state_dict())

    report = job.manager.restore(skip=["loop", "optimizer"])

    assert job.loop == {"best": 7.0} and bits(job.optimizer.state_dict()) == before
    assert report.left_fresh == ("loop", "optimizer")
    assert report.promise.level == "approximate"
    assert "left fresh: loop, optimizer" in str(report)
    job.manager.close()


def test_only_the_items_named_are_restored(url: Path) -> None:
    job = Start(url, two_layers(), seed=3, items=dict(EVERYTHING), loop={"best": 7.0})
    before = streams()

    report = job.manager.restore(items=["model"])

    assert job.loop == {"best": 7.0} and job.optimizer.state_dict()["state"] == {} and streams() == before
    assert set(report.left_fresh) == {"extra", "loop", "optimizer", "rng"}
    job.manager.close()


def test_a_new_head_is_left_fresh_and_the_rest_restored_when_that_is_permitted(url: Path) -> None:
    """Field report B86."""
    saved = sp.open_run(url)
    old = two_layers()
    saved.load(into={"model": old})
    permitted = {"model.added", "optimizer.added"}
    contract = sp.Contract(level="approximate", permit=permitted)
    job = Start(url, two_layers(more=True), items=dict(EVERYTHING), contract=contract)
    fresh = bits(dict(job.model.third.state_dict()))

    report = job.manager.restore()

    assert bits(dict(job.model.first.state_dict())) == bits(dict(old.first.state_dict()))
    assert bits(dict(job.model.third.state_dict())) == fresh
    assert job.model.third.weight not in job.optimizer.state and job.model.first.weight in job.optimizer.state
    assert {"model/third.weight", "model/third.bias", "optimizer/model/third.weight"} <= set(report.left_fresh)
    assert {one.word for one in report.reasons} >= permitted
    job.update()
    job.manager.close()


def test_names_that_exist_on_neither_side_are_a_wrong_call(url: Path) -> None:
    job = Start(url, two_layers(), items=dict(EVERYTHING))
    for options in ({"skip": ["optimiser"]}, {"items": ["modle"]}, {"late": ["emma"]}):
        with pytest.raises(sp.RequestError, match="do not exist"):
            job.manager.restore(**options)
    with pytest.raises(sp.RequestError, match="cannot be late"):
        job.manager.restore(late=["model"])
    job.manager.close()


def test_an_item_that_the_checkpoint_does_not_have_cannot_be_registered_after_the_restore(url: Path) -> None:
    job = Start(url, two_layers(), items=dict(EVERYTHING))
    job.manager.restore()

    with pytest.raises(sp.MismatchError, match="average"):
        job.manager.register("average", {"a": 1})

    job.update()
    # Once the run has gone on, an object is a new one.
    job.manager.register("average", {"a": 1})
    job.manager.save()
    job.manager.close()
    assert "average" in sp.open_run(url).manifest().items


def test_registering_an_object_or_a_name_twice_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(sp.RequestError, match="twice"):
        sp.CheckpointManager(tmp_path, {"model": model, "net": model})
    manager = sp.CheckpointManager(tmp_path, {"model": model})
    with pytest.raises(sp.RequestError, match="taken"):
        manager.register("model", nn.Linear(1, 1))
    with pytest.raises(sp.RequestError, match="reserved"):
        manager.register("rng", {})
    with pytest.raises(sp.RequestError, match="cannot be captured"):
        manager.register("function", len)
    manager.close()
    assert not (tmp_path / "run.json").exists()


def test_a_value_that_cannot_be_stored_is_named_by_its_path_and_ends_the_handle(tmp_path: Path) -> None:
    loop: dict[str, Any] = {"best": {"model": object()}}
    manager = sp.CheckpointManager(tmp_path, {"loop": loop}, save=sp.every(updates=1))
    with pytest.raises(sp.RequestError, match=r"loop.*best.*model"):
        manager.after_update()
    manager.after_microbatch()
    handle = manager.save()
    with pytest.raises(sp.RequestError, match=r"loop.*best.*model"):
        manager.after_update()
    with pytest.raises(sp.RequestError, match=r"loop.*best.*model"):
        handle.wait()
    loop["best"] = 1.0
    assert manager.save().committed
    manager.close()


def test_a_parameter_without_a_name_is_refused_at_the_save(tmp_path: Path) -> None:
    stray = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([stray], lr=0.1)
    manager = sp.CheckpointManager(tmp_path, {"model": nn.Linear(1, 1), "optimizer": optimizer})
    with pytest.raises(sp.RequestError, match="no registered module"):
        manager.save()
    manager.close()


def test_a_tie_that_came_or_went_is_a_difference(tmp_path: Path) -> None:
    """Field report B143."""

    def start(is_tied: bool) -> sp.CheckpointManager:
        model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
        if is_tied:
            model["b"].weight = model["a"].weight
        return sp.CheckpointManager(tmp_path, {"model": model})

    manager = start(is_tied=True)
    manager.save()
    manager.close()
    manager = start(is_tied=False)
    with pytest.raises(sp.MismatchError, match=r"b\.weight") as caught:
        manager.restore()
    assert {one.word for one in caught.value.differences} == {"model.tie"}
    manager.close()


def test_one_refusal_lists_all_the_words_that_a_new_head_needs(url: Path) -> None:
    """Permitting them is enough: what follows from them is not asked for in a second refusal."""
    error = refusal(Start(url, two_layers(more=True), items=dict(EVERYTHING)))
    permitted = {one.word for one in error.differences}
    job = Start(url, two_layers(more=True), items=dict(EVERYTHING), contract=sp.Contract(permit=permitted))
    report = job.manager.restore()
    assert report.promise.level == "approximate"
    assert {one.word for one in report.reasons} == permitted == {"model.added", "optimizer.added"}
    job.manager.close()


def test_an_item_that_is_left_out_is_not_compared(url: Path) -> None:
    other = two_layers(5)
    job = Start(url, other, items=dict(EVERYTHING))
    report = job.manager.restore(skip=["model", "optimizer"])
    assert sorted(one.word for one in report.reasons) == ["model.skipped", "optimizer.skipped"]
    job.manager.close()
