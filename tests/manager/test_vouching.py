"""Which input tells where the batches of an update came from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

import safepoint as sp
from safepoint.data import Cursor, ResumableLoader
from tests.manager.jobs import Died, Points
from tests.manager.test_foreign_loaders import Script


@pytest.mark.parametrize("other", ["a loader for validation", "a cursor that never moves"])
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_the_position_of_one_input_does_not_vouch_for_another(tmp_path: Path, other: str, is_wrapped: bool) -> None:
    validation = ResumableLoader(Points(), 4, seed=1)
    item = validation if other == "a loader for validation" else Cursor(seek=lambda offset: None)
    plain = list(DataLoader(Points(), 4))  # type: ignore[arg-type]
    job = Script(tmp_path, plain, seed=0, is_item=False, items={"other": item})
    with job.manager:
        if is_wrapped:
            for _ in job.manager.batches(validation):
                pass
        batches = iter(plain)
        for batch in job.manager.batches(batches) if is_wrapped else batches:
            job.update(batch)
            job.manager.after_update(samples=4)
            if job.manager.progress.step == 2:
                break
        job.manager.save()

    with pytest.raises(sp.ContractError) as caught:
        items = {"other": ResumableLoader(Points(), 4, seed=1) if item is validation else item}
        Script(tmp_path, plain, seed=0, is_item=False, items=items).manager.restore()
    assert [one.word for one in caught.value.differences] == ["data_position"]


def test_a_cursor_that_the_loops_body_moves_tells_the_position_of_what_it_reads(tmp_path: Path) -> None:
    plain = list(DataLoader(Points(), 4))  # type: ignore[arg-type]
    cursor = Cursor(seek=lambda offset: None)
    job = Script(tmp_path, plain, seed=0, is_item=False, items={"cursor": cursor})
    with job.manager:
        for batch in job.manager.batches(iter(plain)):
            cursor.advance(4)
            job.update(batch)
            job.manager.after_update()
            if job.manager.progress.step == 2:
                break
        job.manager.save()
    again = Script(tmp_path, plain, seed=0, is_item=False, items={"cursor": Cursor(seek=lambda offset: None)})
    with again.manager:
        assert "data_position" not in {one.word for one in again.manager.restore().promise.reasons}


class Counting(IterableDataset[Any]):
    """Keep a place of its own."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < len(Points()):
            self.place += 1
            yield Points()[self.place - 1]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def test_a_data_set_that_workers_read_in_copies_tells_no_position(tmp_path: Path) -> None:
    def make() -> Script:
        numbers = Counting()
        contract = sp.Contract(level="same_data")
        loader = DataLoader(numbers, 4, num_workers=1)
        return Script(tmp_path, loader, seed=0, is_item=False, items={"numbers": numbers}, contract=contract)

    job = make()
    with pytest.raises(Died), job.manager:
        job.run(cut=2)
    with pytest.raises(sp.ContractError) as caught:
        make().manager.restore()
    assert [one.word for one in caught.value.differences] == ["data_position"]
