"""After a restore the live state is compared with what was saved, what the user's own objects tell included."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import safepoint as sp
from safepoint.data import ResumableLoader


class Deaf:
    """Does not take what it is given."""

    def __init__(self, n: int) -> None:
        self.n = n

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class Lazy:
    """Takes what it is given when it is next iterated."""

    def __init__(self, n: int) -> None:
        self.n = self.given = n

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["n"]

    def __iter__(self) -> Iterator[int]:
        self.n = self.given
        yield self.n


def saved_item(url: Path, entry: object) -> None:
    manager = sp.CheckpointManager(url, {"meter": entry})
    manager.save()
    manager.close()


def test_an_object_that_did_not_take_its_state_lowers_the_promise_by_its_word(tmp_path: Path) -> None:
    saved_item(tmp_path, Deaf(9))
    manager = sp.CheckpointManager(tmp_path, {"meter": Deaf(0)})
    with pytest.raises(sp.ContractError, match=r"load_state_dict\(\) was given") as caught:
        manager.restore()
    assert [one.word for one in caught.value.differences] == ["meter.state"]
    assert "Nothing was changed" not in str(caught.value)
    with pytest.raises(sp.InternalError, match="mixture"):
        manager.after_update()
    manager.close()

    manager = sp.CheckpointManager(tmp_path, {"meter": Deaf(0)}, contract=sp.Contract(permit={"meter.state"}))
    report = manager.restore()
    assert report.promise.level == "approximate"
    assert [one.word for one in report.reasons] == ["meter.state"]
    assert "load_state_dict() was given" in str(report)
    manager.after_update()
    manager.close()


def test_an_iterable_that_takes_its_state_when_it_is_next_iterated_is_noted_and_lowers_nothing(tmp_path: Path) -> None:
    """So do loaders and data sets of others: they tell the state that they were given only while they are iterated."""
    saved_item(tmp_path, Lazy(9))
    lazy = Lazy(0)
    manager = sp.CheckpointManager(tmp_path, {"meter": lazy})
    report = manager.restore()
    assert report.promise.level == "exact"
    assert len(report.notes) == 1 and "meter" in report.notes[0] and report.notes[0] in str(report)
    assert next(iter(lazy)) == 9
    manager.close()


def test_a_loader_that_goes_on_by_other_settings_is_noted_as_what_it_is_and_not_as_a_fault(tmp_path: Path) -> None:
    def manager_of(batch_size: int) -> sp.CheckpointManager:
        loader = ResumableLoader(range(24), batch_size, seed=0)  # type: ignore[arg-type]
        contract = sp.Contract("approximate", permit={"global_batch"})
        return sp.CheckpointManager(tmp_path, {"data": loader}, contract=contract)

    with manager_of(2) as manager:
        manager.restore()
        manager.save()
    with manager_of(4) as manager:
        notes = manager.restore().notes
    assert notes == ("data: has taken its state, and tells it by the settings and ranks of this job",)


# Sides of a weight that is digested again, and of one of which some bytes are looked at.
SMALL, LARGE = 64, 256


class Vandal:
    """Writes to a weight of somebody else's while it takes its own state."""

    def __init__(self, vandalise: Callable[[], object] = lambda: None) -> None:
        self._vandalise = vandalise

    def state_dict(self) -> dict[str, int]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._vandalise()


def add_in_place(model: torch.nn.Linear) -> None:
    with torch.no_grad():
        model.weight[3, 5] += 1


def zero_past_the_count(model: torch.nn.Linear) -> None:
    model.weight.data.zero_()


def zero_by_numpy(model: torch.nn.Linear) -> None:
    model.weight.detach().numpy()[...] = 0


def zero_a_row_past_the_count(model: torch.nn.Linear) -> None:
    model.weight.data[40].zero_()


def exchange_memory(model: torch.nn.Linear) -> None:
    model.weight.data = torch.zeros_like(model.weight)


def add_past_the_count(model: torch.nn.Linear) -> None:
    model.weight.data[3, 5] += 1


def vandalised(
    url: Path, vandalise: Callable[[torch.nn.Linear], None], read_back: bool | str, *, side: int
) -> sp.RestoreReport:
    # Which bytes of a row are zero already is up to the seed.
    torch.manual_seed(0)
    model = torch.nn.Linear(side, side)
    with sp.CheckpointManager(url, {"model": model, "vandal": Vandal()}) as manager:
        manager.save()
    manager = sp.CheckpointManager(
        url, {"model": model, "vandal": Vandal(lambda: vandalise(model))}, read_back=read_back
    )
    try:
        return manager.restore()
    finally:
        manager.close()


@pytest.mark.parametrize("side", [SMALL, LARGE])
@pytest.mark.parametrize(
    "vandalise", [add_in_place, zero_past_the_count, zero_by_numpy, zero_a_row_past_the_count, exchange_memory]
)
def test_a_weight_that_is_overwritten_while_the_restore_goes_on_is_noticed(
    vandalise: Callable[[torch.nn.Linear], None], side: int, tmp_path: Path
) -> None:
    """Spec: C11.8"""
    with pytest.raises(sp.InternalError, match=r"not what was saved.*model.*weight"):
        vandalised(tmp_path, vandalise, True, side=side)


def test_every_byte_of_a_small_tensor_is_digested_again(tmp_path: Path) -> None:
    """Spec: C11.8"""
    with pytest.raises(sp.InternalError, match=r"not what was saved.*model.*weight"):
        vandalised(tmp_path, add_past_the_count, True, side=SMALL)


def test_the_place_in_a_tree_that_was_changed_while_the_restore_goes_on_is_named(tmp_path: Path) -> None:
    def noted(value: float, act: Callable[[], object] = lambda: None) -> dict[str, Any]:
        notes = {"long": list(range(300)), "inner": {"rates": [0.5, value]}}
        return {"notes": notes, "vandal": Vandal(act)}

    with sp.CheckpointManager(tmp_path, noted(1.0)) as manager:
        manager.save()
    state = noted(0.0, lambda: state["notes"]["inner"]["rates"].__setitem__(1, 2.0))
    with pytest.raises(sp.InternalError) as caught, sp.CheckpointManager(tmp_path, state) as manager:
        manager.restore()
    error = caught.value
    assert (error.where, error.expected, error.found) == ("notes", "state.inner.rates[1]: 1.0", "2.0")
    assert "restore(step=...)" in error.remedy and "report it" in error.remedy


def test_a_write_past_the_count_that_no_sample_meets_is_noticed_where_every_byte_is_digested_again(
    tmp_path: Path,
) -> None:
    """Spec: C11.8"""
    with pytest.raises(sp.InternalError, match=r"not what was saved.*model.*weight"):
        vandalised(tmp_path, add_past_the_count, "full", side=LARGE)


class Hoarder:
    """Hands out a tensor of its own, and keeps another one than it was given."""

    def __init__(self) -> None:
        self.kept = torch.ones(100)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.kept = state["kept"]
        self.kept.numpy()[7] += 1


def test_what_the_users_own_object_holds_is_digested_wherever_it_lies(tmp_path: Path) -> None:
    """Spec: C11.8"""
    saved_item(tmp_path, Hoarder())
    manager = sp.CheckpointManager(tmp_path, {"meter": Hoarder()})
    with pytest.raises(sp.ContractError, match=r"load_state_dict\(\) was given"):
        manager.restore()
    manager.close()


def test_only_the_ways_to_read_back_that_there_are_can_be_asked_for(tmp_path: Path) -> None:
    for wrong in ("fully", 1, None):
        with pytest.raises(sp.RequestError, match="read_back"):
            sp.CheckpointManager(tmp_path, {"state": {"n": 1}}, read_back=wrong)  # type: ignore[arg-type]
