"""The end of an epoch belongs to the state: what follows it is neither lost nor done twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import safepoint as sp
from tests.manager.jobs import Died, Job, Points, build, die, picture, seed_all, step, streams

EPOCHS = 2
PER_EPOCH = 6


def per_epoch(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def validate(job: Job) -> None:
    """Draw from the global stream, as a validation with its own shuffling loader does, and note how often."""
    for values, _ in DataLoader(Points(8), 4, shuffle=True):  # type: ignore[arg-type]
        job.trace.append(("validation", job.manager.progress.epoch, float(values.sum() + torch.rand(()))))


def run(job: Job, at: Callable[[Job, str], object] = lambda job, place: None) -> list[Any]:
    """Train as a script does, and call `at` at each place where a test may want to cut."""
    for _ in job.manager.epochs(EPOCHS):
        for batch in job.manager.batches(job.loader):
            step(job, batch, steps_scheduler=False)
            job.manager.after_update()
            at(job, f"update {job.manager.progress.step}")
        at(job, f"before the end of {job.manager.progress.epoch}")
        validate(job)
        job.scheduler.step()
    return job.trace


def cut_at(place: str) -> Callable[[Job, str], object]:
    def at(job: Job, here: str) -> None:
        if here == place:
            job.manager.save()
            raise Died

    return at


CUTS = [f"update {n}" for n in range(1, EPOCHS * PER_EPOCH + 1)] + [f"before the end of {n}" for n in range(EPOCHS)]


def test_a_script_cut_anywhere_goes_on_bit_for_bit_with_its_epoch_ends(tmp_path: Path) -> None:
    """Cuts inside epochs, on their last update, and before the validation and the scheduler step that follow.

    Field reports B07, B21, B110, B111, B113, B114, B122, B178.
    """
    whole = build(tmp_path / "whole", scheduler=per_epoch)
    expected = run(whole)
    after = picture(whole)
    for number, place in enumerate(CUTS):
        url = tmp_path / str(number)
        job = build(url, scheduler=per_epoch)
        with pytest.raises(Died), job.manager:
            run(job, cut_at(place))
        before = job.trace

        job = build(url, seed=50 + number, scheduler=per_epoch)
        with job.manager:
            report = job.manager.restore()
            run(job)

        assert report.promise.level == "exact", place
        assert before + job.trace == expected, place
        assert picture(job) == after, place


def test_a_save_due_on_an_epochs_last_update_is_made_at_its_end(tmp_path: Path) -> None:
    whole = build(tmp_path / "whole", scheduler=per_epoch)
    expected = run(whole)
    job = build(tmp_path / "run", scheduler=per_epoch, save=sp.every(updates=PER_EPOCH))
    seen: list[tuple[str, list[int]]] = []

    def at(job: Job, place: str) -> None:
        seen.append((place, [one.step for one in job.manager.checkpoints()]))
        if place == "update 7":
            raise Died

    with pytest.raises(Died), job.manager:
        run(job, at)

    assert ("before the end of 0", []) in seen and seen[-1] == ("update 7", [6])
    job = build(tmp_path / "run", seed=9, scheduler=per_epoch)
    with job.manager:
        assert not job.manager.epoch_end_due
        job.manager.restore()
        assert job.manager.progress == sp.Progress(step=6, microbatches=6, samples=22, epoch=1)
        assert job.optimizer.param_groups[0]["lr"] == 0.025
        run(job)
    # The validation of the first epoch stands before the cut, the seven updates of the first start are six and one.
    assert job.trace == expected[PER_EPOCH + 2 :]


def test_a_save_directly_after_a_validation_pass_holds_what_it_drew(tmp_path: Path) -> None:
    def script(job: Job, *, cut: bool) -> None:
        for batch in job.loader:
            step(job, batch)
            job.manager.after_update()
            if job.manager.progress.step == 3 and cut:
                validate(job)
                job.manager.save()
                raise Died
            if job.manager.progress.step == 3:
                validate(job)

    whole = build(tmp_path / "whole")
    script(whole, cut=False)
    job = build(tmp_path / "run")
    with pytest.raises(Died), job.manager:
        script(job, cut=True)

    again = build(tmp_path / "run", seed=5)
    again.manager.restore()
    script(again, cut=False)

    assert job.trace + again.trace == whole.trace
    assert picture(again) == picture(whole)
    again.manager.close()


def test_without_end_epoch_a_per_epoch_schedule_lowers_the_promise_at_that_point(tmp_path: Path) -> None:
    def script(job: Job, epochs: int) -> None:
        for _ in range(epochs):
            for batch in job.loader:
                step(job, batch, steps_scheduler=False)
                job.manager.after_update()
            job.scheduler.step()

    job = build(tmp_path, scheduler=per_epoch)
    script(job, 1)
    job.manager.save()
    die(job)

    with pytest.raises(sp.ContractError, match="end_epoch") as caught:
        build(tmp_path, scheduler=per_epoch).manager.restore()
    assert [one.word for one in caught.value.differences] == ["epoch_end"]
    contract = sp.Contract(permit={"epoch_end"})
    job = build(tmp_path, scheduler=per_epoch, contract=contract)
    report = job.manager.restore()
    assert report.promise.level == "same_data"
    assert "epoch's last update" in str(report)
    job.manager.close()


def test_a_schedule_stepped_at_each_update_is_no_reason_at_an_epochs_end(tmp_path: Path) -> None:
    job = build(tmp_path, save=sp.every(updates=PER_EPOCH))
    for batch in job.loader:
        step(job, batch)
        job.manager.after_update()
    die(job)

    job = build(tmp_path)
    assert job.manager.restore().promise.level == "exact"
    job.manager.close()


def test_a_script_that_ends_its_epochs_itself_is_known_to_do_so_after_a_resume(tmp_path: Path) -> None:
    """Only the first call of end_epoch() tells; the checkpoint remembers it."""

    def script(job: Job, epochs: int) -> None:
        while job.manager.progress.epoch < epochs:
            if not job.manager.epoch_end_due:
                for batch in job.loader:
                    step(job, batch, steps_scheduler=False)
                    job.manager.after_update()
            job.scheduler.step()
            job.manager.end_epoch()

    job = build(tmp_path, scheduler=per_epoch, save=sp.every(updates=PER_EPOCH - 1))
    script(job, 1)
    for batch in job.loader:
        step(job, batch, steps_scheduler=False)
        job.manager.after_update()
        if job.manager.progress.step == 2 * PER_EPOCH - 2:
            break
    die(job)

    job = build(tmp_path, seed=4, scheduler=per_epoch, save=sp.every(updates=1))
    job.manager.restore()
    for batch in job.loader:
        step(job, batch, steps_scheduler=False)
        job.manager.after_update()
    assert [one.step for one in job.manager.checkpoints()] == [11, 10, 5]
    job.scheduler.step()
    job.manager.end_epoch()
    assert [one.step for one in job.manager.checkpoints()] == [12, 11, 10, 5]
    job.manager.close()


def test_a_finished_run_asked_for_more_epochs_makes_only_these(tmp_path: Path) -> None:
    """Field report B119."""
    job = build(tmp_path)
    run(job)
    job.manager.save()
    job.manager.close()

    job = build(tmp_path, seed=6)
    job.manager.restore()
    assert list(job.manager.epochs(EPOCHS)) == []
    numbers = []
    for epoch in job.manager.epochs(4):
        numbers.append(epoch)
        for batch in job.manager.batches(job.loader):
            step(job, batch)
            job.manager.after_update()
    assert numbers == [2, 3]
    assert job.manager.progress.step == 4 * PER_EPOCH
    job.manager.close()


def test_numbers_of_an_epoch_are_saved_with_its_end_and_choose_what_is_kept(tmp_path: Path) -> None:
    """Epoch 1 of 0 to 3 has the least error: its checkpoint stays beside the two newest good ones, and tells both."""
    errors = {0: 0.9, 1: 0.2, 2: 0.5, 3: 0.4}
    schedule, keep = sp.every(updates=PER_EPOCH), sp.keep(last=2, best=("error", "min"))
    job = build(tmp_path, save=schedule, keep=keep, scheduler=per_epoch)
    job.manager.restore()
    for epoch in job.manager.epochs(4):
        for batch in job.manager.batches(job.loader):
            step(job, batch, steps_scheduler=False)
            job.manager.after_update(metrics={"loss": float(job.manager.progress.step), "error": 7.0})
        job.scheduler.step()
        job.manager.end_epoch(metrics={"error": torch.tensor(errors[epoch])})
    job.manager.close()

    told = {checkpoint.step: checkpoint.metrics for checkpoint in sp.open_run(tmp_path).checkpoints()}
    assert told.keys() == {2 * PER_EPOCH, 3 * PER_EPOCH, 4 * PER_EPOCH}
    assert told[2 * PER_EPOCH] == {"loss": 2 * PER_EPOCH - 1.0, "error": pytest.approx(0.2)}


def test_a_wrong_number_of_an_epoch_leaves_the_epoch_open(tmp_path: Path) -> None:
    job = build(tmp_path)
    job.manager.restore()
    for batch in job.manager.batches(job.loader):
        step(job, batch)
        job.manager.after_update()
    with pytest.raises(sp.RequestError, match="a metric is not a number"):
        job.manager.end_epoch(metrics={"error": "low"})
    assert job.manager.epoch_end_due and job.manager.progress.epoch == 0
    job.manager.end_epoch(metrics={"error": 0.5})
    assert job.manager.progress.epoch == 1


def test_ending_an_epoch_that_has_not_come_to_its_end_is_refused(tmp_path: Path) -> None:
    job = build(tmp_path)
    step(job, next(iter(job.loader)))
    job.manager.after_update()
    with pytest.raises(sp.RequestError, match="step 1"):
        job.manager.end_epoch()
    job.manager.close()


def test_what_a_start_draws_before_its_epochs_is_undone_also_at_an_epochs_begin(tmp_path: Path) -> None:
    """Field report B177."""
    whole = build(tmp_path / "whole")
    run(whole)
    after = picture(whole)
    job = build(tmp_path / "run", save=sp.every(updates=PER_EPOCH))
    with pytest.raises(Died), job.manager:
        run(job, lambda job, place: (_ for _ in ()).throw(Died()) if place == "update 8" else None)

    job = build(tmp_path / "run", seed=4)
    assert job.manager.restore().step == PER_EPOCH
    seed_all(1234)
    run(job)

    assert picture(job) == after
    job.manager.close()


def test_passes_without_end_epoch_follow_one_another(tmp_path: Path) -> None:
    job = build(tmp_path)
    while job.manager.progress.step < 2 * PER_EPOCH + 1:
        for batch in job.manager.batches(job.loader):
            step(job, batch)
            job.manager.after_update()
    assert job.manager.progress == sp.Progress(step=18, microbatches=18, samples=66, epoch=2, epoch_end_due=True)
    job.manager.close()


def test_a_validation_that_swaps_other_weights_in_leaves_the_raw_ones_in_every_checkpoint(tmp_path: Path) -> None:
    """A save that falls due at an epoch's last update is made after what follows it. Field report B25."""
    job = build(tmp_path, save=sp.every(updates=PER_EPOCH))
    raw: dict[str, torch.Tensor] = {}
    for _ in job.manager.epochs(1):
        for batch in job.manager.batches(job.loader):
            step(job, batch)
            job.manager.after_update()
        raw = {name: value.clone() for name, value in job.model.state_dict().items()}
        job.model.load_state_dict({name: value * 2 for name, value in raw.items()})
        validate(job)
        job.model.load_state_dict(raw)
    job.manager.close()

    again = build(tmp_path, seed=3)
    again.manager.restore()
    assert all(torch.equal(value, raw[name]) for name, value in again.model.state_dict().items())
    again.manager.close()


def test_once_the_training_goes_on_no_stream_is_put_back(tmp_path: Path) -> None:
    """A loop that uses no loader of the manager is followed by one that does."""
    job = build(tmp_path)
    job.manager.after_update()
    job.manager.save()
    job.manager.close()

    job = build(tmp_path, seed=2)
    job.manager.restore()
    torch.rand(3)
    job.manager.after_update()
    before = streams()
    next(job.manager.epochs(2))
    assert streams() == before
    job.manager.close()
