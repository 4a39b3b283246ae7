"""A loader over torch's `DataLoader` whose position is the batches that training took, not those fetched ahead.

Invariants:

1. A batch counts as handed out at the moment the loop receives it, and never otherwise: not when a worker prefetches
   it, not when loading it failed.
2. What is saved is the committed position once anybody commits, else the handed-out one.
3. At most one iterator is alive: making another, or loading a state, ends the older one with an error, never silently.
4. Neither making an iterator nor loading a batch moves a random stream of the training process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from safepoint.data.dataset import NO_LENGTH_REMEDY, DatasetIdentity, MapDataset, identify
from safepoint.data.order import check_number, derive
from safepoint.data.position import (
    Batch,
    BatchPlan,
    Position,
    compare_record,
    parse_record,
    record_position,
    resume_position,
)
from safepoint.data.streams import PER_BATCH, PER_SAMPLE, Fetch, as_loaded
from safepoint.data.workers import WorkerStart
from safepoint.errors import Difference, InternalError, RequestError


class ResumableLoader:
    """Load batches in a computed order that a resumed run goes on with, whatever the number of workers.

    Each `for` runs the rest of the current epoch, the next `for` the next epoch; no pass is empty until `epochs` are
    done. A new `for` after a `break` goes on after the last batch handed out.

    Args:
        dataset: A data set with a length and an index.
        batch_size: Samples per batch of this rank; a global batch has ``batch_size * world_size``.
        seed: From 0 to 2**64 - 1; gives the order of each epoch and the random streams of the samples.
        shuffle: False keeps the order of the data set.
        drop_last: Leave out a last global batch that is not full.
        num_workers: Processes that load; 0 loads in this one. May differ at each start of a run.
        prefetch_factor: Batches that each worker loads ahead; torch's default is 2.
        collate_fn: Makes a batch from a list of samples; torch's `default_collate` if absent.
        rank: This process, counted from 0.
        world_size: Number of processes that divide each global batch.
        epochs: Number of epochs after which a `for` yields nothing; None for no end. Not part of the state.
        name: Name of the data set, compared at a restore; its class by default.
        fingerprint: Text that changes when the samples change, compared at a restore.
        worker_init_fn: Called with the worker's number at its start.
        pin_memory: As in torch.
        persistent_workers: Keep the workers from one epoch to the next.
        sample_streams: Seed the global random streams around each sample. False seeds them once a batch, which costs
            less: still the same with any number of workers, but another batch size gives other augmentation. The data
            set's ``__getitems__`` is used then, if it has one.
        multiprocessing_context: How workers are started: ``fork``, ``spawn``, ``forkserver``.
        timeout_s: Longest wait for a batch from a worker; 0 waits for ever.

    Raises:
        RequestError: A setting is wrong, or the data set has no length.
    """

    def __init__(
        self,
        dataset: MapDataset,
        batch_size: int = 1,
        *,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = False,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        collate_fn: Callable[[list[Any]], object] | None = None,
        rank: int = 0,
        world_size: int = 1,
        epochs: int | None = None,
        name: str | None = None,
        fingerprint: str | None = None,
        worker_init_fn: Callable[[int], object] | None = None,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        sample_streams: bool = True,
        multiprocessing_context: str | None = None,
        timeout_s: float = 0,
    ) -> None:
        if epochs is not None:
            check_number("epochs", epochs, 0, (1 << 63) - 1)
        _check_options(name=name, fingerprint=fingerprint, shuffle=shuffle, drop_last=drop_last)
        identity = _identity_of(dataset, name, fingerprint)
        self.dataset = dataset
        self.batch_size = batch_size
        # Called just before each batch is given to the loop; the manager puts the random streams in place here.
        self.before_handing: Callable[[], None] | None = None
        self._plan = BatchPlan(identity, seed, shuffle, drop_last, batch_size, rank, world_size)
        self._epochs = epochs
        self._streams = PER_SAMPLE if sample_streams else PER_BATCH
        self._handed = self._committed = Position()
        self._handed_batches = self._committed_batches = 0
        self._uses_commit = False
        self._live: weakref.ref[_Pass] | None = None
        self._generator = torch.Generator()
        fetch = Fetch(dataset, collate_fn or default_collate, seed=seed, per_sample=sample_streams)
        self._torch_loader = _torch_loader(
            fetch,
            _RestOfEpoch(self),
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            worker_init_fn=WorkerStart(worker_init_fn),
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            multiprocessing_context=multiprocessing_context,
            timeout=timeout_s,
            generator=self._generator,
        )

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch."""
        return self._plan.batches_per_epoch

    # The type of a batch is whatever the user's collation returns.
    def __iter__(self) -> Iterator[Any]:
        self._end_live("another iterator was made")
        if self.finished:
            return iter(())
        # The workers' first seed is drawn from this generator; a function of the position, like everything else.
        self._generator.manual_seed(derive(self._plan.seed, self._handed.epoch, self._handed.samples))
        live = _Pass(self, iter(self._torch_loader), self._plan.remaining(self._handed))
        self._live = weakref.ref(live)
        return live

    @property
    def epoch(self) -> int:
        """Return the epoch of the next batch to be handed out, counted from 0.

        Once the loop has received the last batch of an epoch this is the next epoch already.
        """
        return self._handed.epoch

    @property
    def position(self) -> int:
        """Return the number of batches of this epoch handed out."""
        return self._handed.batches

    @property
    def remaining(self) -> int:
        """Return the number of batches still to come in this epoch; 0 only when all epochs are done."""
        return 0 if self.finished else self._plan.remaining(self._handed)

    @property
    def handed(self) -> int:
        """Return the number of batches handed out in the whole run."""
        return self._handed_batches

    @property
    def uncommitted(self) -> int:
        """Return the number of batches handed out and not committed."""
        return self._handed_batches - self._committed_batches

    @property
    def uncommitted_samples(self) -> int:
        """Return the number of this rank's samples in the batches handed out and not committed."""
        return self._plan.samples_in(self._committed, self.uncommitted)

    @property
    def uncommitted_total(self) -> int:
        """Return the number of samples of all ranks in these batches."""
        return self._plan.total_in(self._committed, self.uncommitted)

    @property
    def finished(self) -> bool:
        """Return whether all epochs that were asked for are handed out."""
        return self._epochs is not None and self._handed.epoch >= self._epochs

    @property
    def identity(self) -> DatasetIdentity:
        """Return the identity of the data set, as compared at a restore."""
        return self._plan.dataset

    @property
    def global_batch(self) -> int:
        """Return the number of samples in a full batch of all ranks."""
        return self._plan.global_batch

    def commit(self, batches: int | None = None) -> None:
        """Count batches as finished with: their update is complete.

        Args:
            batches: How many more; None for all that were handed out.

        Raises:
            RequestError: There are more than were handed out.
        """
        if batches is None:
            batches = self.uncommitted
        check_number("batches", batches, 0, self.uncommitted)
        self._uses_commit = True
        self._committed = self._plan.advance(self._committed, batches)
        self._committed_batches += batches

    def last_ids(self) -> list[int]:
        """Return this rank's sample indices in the batches handed out since the last commit, in order.

        Before any commit: since the loader was made or its state was loaded.
        """
        ids: list[int] = []
        position = self._committed
        for _ in range(self.uncommitted):
            ids += self._plan.batch_at(position).indices
            position = self._plan.advance(position, 1)
        return ids

    def differences(self, state: Mapping[str, object]) -> list[Difference]:
        """Return every difference between a saved state's settings and this loader's; changes nothing.

        Raises:
            FormatVersionError: A newer version of safepoint wrote the state.
            MismatchError: The state is not one of this kind of loader, or names an unknown order.
            RequestError: The rest of the epoch cannot be divided among the ranks.
        """
        return compare_record(parse_record(state), self._plan, streams=self._streams)

    def state_dict(self) -> dict[str, object]:
        """Return the position and the settings it depends on, as plain values, the same on all ranks.

        The position is the committed one once `commit` was called: batches handed out after it (``ahead`` of them) are
        handed out again by a loader that resumes.
        """
        position = self._committed if self._uses_commit else self._handed
        return record_position(
            self._plan,
            position,
            handed=self._handed_batches,
            ahead=self.uncommitted if self._uses_commit else 0,
            streams=self._streams,
        ).to_plain()

    def load_state_dict(self, state: Mapping[str, object], *, permit: frozenset[str] = frozenset()) -> None:
        """Go to a saved position; the next `for` starts there, and a running one ends with an error.

        Another batch size or world size is taken: the batches are cut from the saved sample on. `differences` names it.

        Args:
            state: What `state_dict` returned.
            permit: ``dataset`` takes another data set, ``dataset.order`` another seed, shuffle or drop_last: the
                position is then that of the saved run in the order of this loader.

        Raises:
            FormatVersionError: A newer version of safepoint wrote the state.
            MismatchError: Another data set or order, not permitted by its word; nothing was changed.
            RequestError: The rest of the epoch cannot be divided among the ranks; nothing was changed.
        """
        record = parse_record(state)
        differences = compare_record(record, self._plan, streams=self._streams)
        position = resume_position(self._plan, record, differences, permit)
        self._end_live("a state was loaded into the loader")
        self._handed = self._committed = position
        self._handed_batches = self._committed_batches = record.handed - record.ahead

    def _end_live(self, reason: str) -> None:
        live = self._live() if self._live is not None else None
        if live is not None:
            live.end(reason)
        self._live = None

    def _rest_of_epoch(self) -> Iterator[Batch]:
        return self._plan.rest_of_epoch(self._handed)

    def _hand_out(self) -> None:
        self._handed = self._plan.advance(self._handed, 1)
        self._handed_batches += 1


class _RestOfEpoch:
    """Give torch's loader the batches from the loader's position on, at each `iter`."""

    def __init__(self, loader: ResumableLoader) -> None:
        self._loader = weakref.proxy(loader)

    def __iter__(self) -> Iterator[Batch]:
        return cast("Iterator[Batch]", self._loader._rest_of_epoch())  # a proxy has no type of its own

    def __len__(self) -> int:
        return len(self._loader)


class _Pass:
    """Run the rest of one epoch."""

    __slots__ = ("__weakref__", "_batches", "_ended_because", "_left", "_loader")

    def __init__(self, loader: ResumableLoader, batches: Iterator[object], left: int) -> None:
        self._loader = loader
        self._batches: Iterator[object] | None = batches
        self._left = left
        self._ended_because = ""

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> object:
        if self._ended_because:
            raise RequestError(
                f"this iterator of the loader has ended: {self._ended_because}",
                where=self._loader.identity.name,
                found=f"the loader at epoch {self._loader.epoch}, batch {self._loader.position}",
                remedy="Begin a new `for` over the loader; it goes on there.",
            )
        if self._batches is None:
            raise StopIteration
        loaded = False
        try:
            batch = next(self._batches, _NO_MORE)
            loaded = True
        finally:
            # torch's iterator would go on with the batch after the one that failed, and leave that one out unseen.
            if not loaded:
                self.end("loading a batch failed")
        if batch is _NO_MORE:
            return self._finish()
        if self._left == 0:
            raise InternalError("torch's loader gave a batch after the epoch's last", where=self._loader.identity.name)
        self._left -= 1
        if self._loader.before_handing is not None:
            self._loader.before_handing()
        self._loader._hand_out()
        return batch

    def end(self, reason: str) -> None:
        """Refuse to go on, and let the workers go. A pass that came to its end stays at its end."""
        if self._batches is not None:
            self._ended_because = reason
            self._batches = None

    def _finish(self) -> object:
        if self._left:
            raise InternalError(
                "torch's loader ended before the epoch did",
                where=self._loader.identity.name,
                found=f"{self._left} batches missing",
            )
        self._batches = None
        raise StopIteration


_NO_MORE = object()


# The options are those of torch's DataLoader, of as many types.
def _torch_loader(fetch: Fetch, batches: _RestOfEpoch, **options: Any) -> DataLoader[object]:
    # torch needs of a data set __getitems__ alone, which `fetch` has, and takes any object for the index of a batch;
    # its static types ask for more.
    dataset, batch_sampler = cast("Dataset[object]", fetch), cast(Any, batches)
    try:
        return DataLoader(dataset, batch_sampler=batch_sampler, collate_fn=as_loaded, **options)
    except (ValueError, TypeError) as exc:
        raise RequestError("torch's loader refuses a setting", where="ResumableLoader", found=str(exc)) from exc


def _check_options(*, name: object, fingerprint: object, shuffle: object, drop_last: object) -> None:
    """Raise `RequestError` for what a state could hold and no restore could take."""
    for option, value in (("name", name), ("fingerprint", fingerprint)):
        if value is not None and type(value) is not str:
            raise RequestError("a setting is not text", where=option, expected="a str", found=repr(value))
    for option, value in (("shuffle", shuffle), ("drop_last", drop_last)):
        if type(value) is not bool:
            raise RequestError("a setting is no switch", where=option, expected="True or False", found=repr(value))


def _identity_of(dataset: MapDataset, name: str | None, fingerprint: str | None) -> DatasetIdentity:
    if isinstance(dataset, IterableDataset):
        raise RequestError(
            "an iterable data set has no index, so no order over its samples can be computed",
            where=f"{type(dataset).__module__}.{type(dataset).__qualname__}",
            expected="a data set with __len__ and __getitem__",
            remedy=NO_LENGTH_REMEDY,
        )
    return identify(dataset, name=name, fingerprint=fingerprint)
