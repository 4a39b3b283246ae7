"""Which input tells where the batches of an update came from."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.utils.data import DataLoader

import safepoint as sp
from safepoint.data import Cursor, ResumableLoader
from tests.manager.jobs import Points
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
