"""Loaders that are not safepoint's own: what can be kept is kept exactly, and the rest is said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import safepoint as sp
from safepoint.data import Cursor, ResumableLoader, ResumableSampler, may_repeat
from tests.manager.jobs import Died, Points, bits, seed_all, streams

EPOCHS = 2


class Script:
    """Train a line on the batches of any loader, by `manager.batches`."""

    def __init__(self, url: Path, loader: Any, *, seed: int, is_item: bool, **options: Any) -> None:
        seed_all(seed)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.loader = loader
        items = options.pop("items", {"data": loader} if is_item else {})
        state = {"model": self.model, "optimizer": self.optimizer, **items}
        self.manager = sp.CheckpointManager(url, state, **options)
        self.trace: list[tuple[list[int], str]] = []

    def update(self, batch: Any) -> None:
        values, ids = batch
        loss = (self.model(values).squeeze(-1) - ids.float() / 10).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.trace.append((ids.tolist(), loss.item().hex()))

    def run(self, *, cut: int | None = None, epochs: int = EPOCHS) -> list[tuple[list[int], str]]:
        for _ in self.manager.epochs(epochs):
            for batch in self.manager.batches(self.loader):
                self.update(batch)
                self.manager.after_update(samples=len(batch[1]))
                if self.manager.progress.step == cut:
                    self.manager.save()
                    raise Died
        return self.trace

    def picture(self) -> object:
        return bits(dict(self.model.state_dict())), bits(self.optimizer.state_dict()), streams(), self.manager.progress


def shuffling(workers: int = 0) -> Any:
    """A plain loader: order, worker seeds and samples are all drawn from the global stream."""
    return DataLoader(Points(), 4, shuffle=True, num_workers=workers)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_loader_cut_at_an_epochs_end_goes_on_exactly(tmp_path: Path, workers: int) -> None:
    """At an epoch's begin the restored streams give the order that the uninterrupted run drew.

    Field reports B178, B182.
    """
    whole = Script(tmp_path / "whole", shuffling(workers), seed=0, is_item=False)
    expected = whole.run()
    after = whole.picture()
    job = Script(tmp_path / "run", shuffling(workers), seed=0, is_item=False, save=sp.every(updates=6))
    with pytest.raises(Died), job.manager:
        job.run(cut=8)

    # The save of update 8 lies inside an epoch: it is refused, and the one of update 6 is asked for.
    job = Script(tmp_path / "run", shuffling(workers), seed=9, is_item=False)
    with job.manager:
        report = job.manager.restore(step=6, branch=True)
        done = job.run()

    assert report.promise.level == "exact"
    assert done == expected[6:]
    assert job.picture() == after


def test_a_plain_loader_cut_inside_an_epoch_is_refused_and_says_how_many_batches_are_concerned(
    tmp_path: Path,
) -> None:
    """Its position is saved nowhere. Field reports B17, B10."""
    job = Script(tmp_path, shuffling(), seed=0, is_item=False)
    with pytest.raises(Died), job.manager:
        job.run(cut=2)

    with pytest.raises(sp.ContractError, match="2 batches of this epoch") as caught:
        Script(tmp_path, shuffling(), seed=0, is_item=False).manager.restore()
    assert [one.word for one in caught.value.differences] == ["data_position"]
    contract = sp.Contract(permit={"data_position"})
    again = Script(tmp_path, shuffling(), seed=0, is_item=False, contract=contract)
    with again.manager:
        assert again.manager.restore().promise.level == "approximate"


def test_a_sampler_that_is_an_item_tells_the_position_of_the_plain_loader_around_it(tmp_path: Path) -> None:
    def make(url: Path, seed: int) -> Script:
        sampler = ResumableSampler(22, batch_size=4, seed=3)
        loader = DataLoader(Points(), batch_sampler=sampler)  # type: ignore[arg-type]
        return Script(url, loader, seed=seed, is_item=False, items={"sampler": sampler})

    whole = make(tmp_path / "whole", 0)
    expected = whole.run()
    after = whole.picture()
    for cut in range(1, 12):
        job = make(tmp_path / str(cut), 0)
        with pytest.raises(Died), job.manager:
            job.run(cut=cut)

        job = make(tmp_path / str(cut), 40 + cut)
        with job.manager:
            assert job.manager.restore().promise.level == "exact"
            assert job.run() == expected[cut:], cut
            assert job.picture() == after, cut


def torchdata_script(url: Path, *, seed: int, workers: int = 0, shuffle: bool = True, **options: Any) -> Script:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    seed_all(seed)
    loader = stateful.StatefulDataLoader(Points(), 4, shuffle=shuffle, num_workers=workers)
    return Script(url, loader, seed=seed, is_item=True, **options)


def test_torchdatas_loader_as_an_item_goes_on_exactly(tmp_path: Path) -> None:
    """Also on an epoch's end, and with what its iterators draw. Field reports B06, B07, B09, B21."""
    whole = torchdata_script(tmp_path / "whole", seed=0)
    expected = whole.run()
    after = whole.picture()
    for cut in range(1, 12):
        job = torchdata_script(tmp_path / str(cut), seed=0)
        with pytest.raises(Died), job.manager:
            job.run(cut=cut)

        job = torchdata_script(tmp_path / str(cut), seed=40 + cut)
        with job.manager:
            assert job.manager.restore().promise.level == "exact"
            assert job.run() == expected[cut:], cut
            assert job.picture() == after, cut


@pytest.mark.parametrize(
    ("epochs", "cuts"),
    [
        (1, [(2, "same_data")]),
        pytest.param(EPOCHS, [(2, "same_data"), (6, "exact"), (9, "same_data")], marks=pytest.mark.soak),
    ],
)
def test_torchdatas_workers_keep_the_order_and_their_streams_lower_the_promise(
    tmp_path: Path, epochs: int, cuts: list[tuple[int, str]]
) -> None:
    """What the workers draw for the samples is saved nowhere; which samples come is."""
    whole = torchdata_script(tmp_path / "whole", seed=0, workers=2)
    expected = whole.run(epochs=epochs)
    for cut, level in cuts:
        job = torchdata_script(tmp_path / str(cut), seed=0, workers=2)
        with pytest.raises(Died), job.manager:
            job.run(cut=cut)

        job = torchdata_script(tmp_path / str(cut), seed=5, workers=2, contract=sp.Contract(level="same_data"))
        with job.manager:
            assert job.manager.restore().promise.level == level
            done = job.run(epochs=epochs)
        assert [ids for ids, _ in done] == [ids for ids, _ in expected[cut:]], cut
        assert (done == expected[cut:]) == (level == "exact"), cut


def test_saving_before_the_first_batch_of_a_loader_that_draws_to_tell_its_state_changes_nothing(tmp_path: Path) -> None:
    silent = torchdata_script(tmp_path / "silent", seed=0)
    expected = silent.run()
    after = silent.picture()

    job = torchdata_script(tmp_path / "saving", seed=0, save=sp.every(updates=1))
    before = streams()
    job.manager.save()
    assert streams() == before
    assert job.run() == expected
    assert job.picture() == after
    job.manager.close()


def test_a_save_that_the_contract_will_not_accept_is_told_while_the_run_can_be_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Script(tmp_path, shuffling(), seed=0, is_item=False, save=sp.every(updates=1))
    job.run(epochs=1)
    told = [one for one in caplog.messages if "refused by the contract" in one]
    assert len(told) == 1 and "'data_position'" in told[0]
    job.manager.close()


class Numbers(IterableDataset):  # type: ignore[type-arg]
    """Filters what it reads, so that the count of what it gave is not where it stands. Keeps its place itself."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        while self.read < 30:
            self.read += 1
            if self.read % 3:
                yield torch.full((4,), self.read / 10.0), self.read
        self.read = 0

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


def test_an_iterable_that_keeps_its_own_place_is_an_item_behind_a_plain_loader(tmp_path: Path) -> None:
    """Field report B15."""

    def make(url: Path, seed: int) -> Script:
        numbers = Numbers()
        return Script(url, DataLoader(numbers, 5), seed=seed, is_item=False, items={"numbers": numbers})

    whole = make(tmp_path / "whole", 0)
    expected = whole.run()
    after = whole.picture()
    for cut in range(1, 8):
        job = make(tmp_path / str(cut), 0)
        with pytest.raises(Died), job.manager:
            job.run(cut=cut)

        job = make(tmp_path / str(cut), 40 + cut)
        with job.manager:
            assert job.manager.restore().promise.level == "exact"
            assert job.run() == expected[cut:], cut
            assert job.picture() == after, cut


def test_batches_fetched_ahead_of_a_foreign_loader_are_recorded_and_lower_the_promise(tmp_path: Path) -> None:
    """The loader's state speaks of a later moment than the weights. Field report B06."""

    def make(**options: Any) -> Script:
        return torchdata_script(tmp_path, seed=0, shuffle=False, **options)

    job = make()
    batches = job.manager.batches(job.loader)
    ahead = next(batches)
    for _ in range(2):
        current, ahead = ahead, next(batches)
        job.update(current)
        job.manager.after_update(samples=4, batches=1)
    handle = job.manager.save()
    assert handle.committed
    job.manager.close()

    manifest = sp.open_run(tmp_path).manifest()
    assert manifest.conditions.counts["batches_ahead"] == 1
    with pytest.raises(sp.ContractError, match="1 batches were handed out and not used"):
        make().manager.restore()
    again = make(contract=sp.Contract(permit={"data_ahead"}))
    with again.manager:
        assert again.manager.restore().promise.level == "approximate"


def test_batches_fetched_ahead_of_safepoints_loader_are_handed_out_again(tmp_path: Path) -> None:
    def make(seed: int) -> Script:
        return Script(tmp_path, ResumableLoader(Points(), 4, seed=5), seed=seed, is_item=True)

    expected = [ids.tolist() for _, ids in ResumableLoader(Points(), 4, seed=5)]
    job = make(0)
    batches = iter(job.loader)
    ahead = next(batches)
    due = []
    for _ in range(5):
        current, ahead = ahead, next(batches)
        job.update(current)
        job.manager.after_update(batches=1)
        due.append(job.manager.epoch_end_due)
    assert due == [False] * 5
    assert job.manager.progress == sp.Progress(step=5, microbatches=5, samples=20)
    job.manager.save()
    job.manager.close()

    again = make(7)
    with again.manager:
        assert again.manager.restore().promise.level == "exact"
        assert [ids.tolist() for _, ids in again.loader] == expected[5:]


def test_the_last_update_ends_the_epoch_also_when_the_next_epoch_is_begun_ahead(tmp_path: Path) -> None:
    job = Script(tmp_path, ResumableLoader(Points(12), 4, seed=5), seed=0, is_item=True)
    first = list(iter(job.loader))
    ahead = iter(job.loader)
    due = []
    for current in [*first, next(ahead)]:
        job.update(current)
        job.manager.after_update(batches=1)
        due.append((job.manager.epoch_end_due, job.manager.progress.epoch))
    assert due == [(False, 0), (False, 0), (True, 0), (False, 1)]
    job.manager.close()


def test_a_dropped_batch_belongs_to_no_update_and_does_not_come_back(tmp_path: Path) -> None:
    def make(seed: int) -> Script:
        return Script(tmp_path, ResumableLoader(Points(), 4, seed=5), seed=seed, is_item=True)

    expected = [ids.tolist() for _, ids in ResumableLoader(Points(), 4, seed=5)]
    job = make(0)
    batches = iter(job.loader)
    next(batches)
    job.manager.skip_batch()
    job.update(next(batches))
    job.manager.after_update()
    next(batches)
    job.manager.skip_batch()
    handle = job.manager.save()
    assert handle.committed
    assert job.manager.progress.microbatches == 1
    job.manager.close()

    again = make(7)
    with again.manager:
        again.manager.restore()
        # The batch dropped after the boundary is no part of it: it is handed out again.
        assert [ids.tolist() for _, ids in again.loader] == expected[2:]


def test_a_cursor_is_sought_and_its_replay_policy_is_the_promise(tmp_path: Path) -> None:
    def make(places: list[int], **options: Any) -> Script:
        cursor = Cursor(seek=places.append, replay=may_repeat(64), name="topic")
        return Script(tmp_path, None, seed=0, is_item=False, items={"topic": cursor, "loop": {}}, **options)

    job = make([])
    cursor = job.manager._registry.objects["topic"]
    for _ in range(3):
        cursor.advance(100)  # type: ignore[attr-defined]
        job.update((torch.ones(2, 4), torch.ones(2)))
        job.manager.after_update()
    cursor.advance(7)  # type: ignore[attr-defined]
    handle = job.manager.save()
    assert "'topic'" in handle.deferred
    job.update((torch.ones(2, 4), torch.ones(2)))
    job.manager.after_update()
    job.manager.close()

    with pytest.raises(sp.ContractError, match="up to 64 of the external inputs may come twice"):
        make([]).manager.restore()
    places: list[int] = []
    again = make(places, contract=sp.Contract(permit={"replay"}))
    with again.manager:
        assert again.manager.restore().promise.level == "approximate"
    assert places == [307]


def test_input_from_a_generator_with_a_cursor_is_told_by_the_cursor(tmp_path: Path) -> None:
    lines = [(torch.full((2, 4), n / 10), torch.full((2,), n)) for n in range(9)]

    def make(url: Path, seed: int) -> tuple[Script, Cursor]:
        cursor = Cursor(name="file")
        return Script(url, None, seed=seed, is_item=False, items={"file": cursor}), cursor

    def run(job: Script, cursor: Cursor, until: int) -> None:
        def read() -> Iterator[Any]:
            while cursor.offset < len(lines):
                cursor.advance()
                yield lines[cursor.offset - 1]

        for batch in job.manager.batches(read()):
            job.update(batch)
            job.manager.after_update()
            if job.manager.progress.step == until:
                job.manager.save()
                return

    whole, position = make(tmp_path / "whole", 0)
    run(whole, position, 9)
    job, position = make(tmp_path / "run", 0)
    run(job, position, 4)
    job.manager.close()

    again, position = make(tmp_path / "run", 3)
    with again.manager:
        assert again.manager.restore().promise.level == "exact"
        run(again, position, 9)
    assert job.trace + again.trace == whole.trace


def test_passes_over_a_plain_loader_without_end_epoch_count_its_epochs(tmp_path: Path) -> None:
    job = Script(tmp_path, shuffling(), seed=0, is_item=False)
    while job.manager.progress.step < 13:
        for batch in job.manager.batches(job.loader):
            job.update(batch)
            job.manager.after_update(samples=len(batch[1]))
    assert job.manager.progress == sp.Progress(step=18, microbatches=18, samples=66, epoch=2, epoch_end_due=True)
    job.manager.close()
