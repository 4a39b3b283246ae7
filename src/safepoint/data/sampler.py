"""A batch sampler whose position is the number of batches that training has finished with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized

from safepoint.data.dataset import DatasetIdentity, identify
from safepoint.data.order import check_number
from safepoint.data.position import (
    BatchPlan,
    Position,
    compare_record,
    parse_record,
    record_position,
    resume_position,
)
from safepoint.errors import Difference, RequestError

_NO_STREAMS = "none"


class ResumableSampler:
    """Yield lists of sample indices in a computed order, for ``DataLoader(batch_sampler=...)``.

    A sampler cannot see which batches reached the training loop: a loader with workers asks for them long before. So
    `commit()` has to be called once for each batch that is finished with, also for one that is thrown away;
    `ResumableLoader` does its own counting.

    Each `iter` yields the rest of the current epoch, the next one the next epoch. Before the first `commit` the current
    place is what was yielded; from then on it is what was committed.

    Args:
        dataset: A data set with a length, or the length itself.
        batch_size: Samples per batch of this rank.
        seed: From 0 to 2**64 - 1.
        shuffle: False keeps the order of the data set.
        drop_last: Leave out a last global batch that is not full.
        rank: This process, counted from 0.
        world_size: Number of processes that divide each global batch of ``batch_size * world_size`` samples.
        name: Name of the data set, compared at a restore.
        fingerprint: Text that changes when the samples change, compared at a restore.

    Raises:
        RequestError: A setting is outside its range, or the epoch cannot be cut into batches for all ranks.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        name: str | None = None,
        fingerprint: str | None = None,
    ) -> None:
        if isinstance(dataset, int):
            identity = DatasetIdentity(name or "samples", dataset, fingerprint)
        else:
            identity = identify(dataset, name=name, fingerprint=fingerprint)
        self._plan = BatchPlan(identity, seed, shuffle, drop_last, batch_size, rank, world_size)
        self._yielded = self._committed = Position()
        self._yielded_batches = self._committed_batches = 0
        self._uses_commit = False
        self._pass = 0

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch."""
        return self._plan.batches_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        if self._uses_commit:
            self._yielded, self._yielded_batches = self._committed, self._committed_batches
        self._pass += 1
        return self._rest(self._pass, self._yielded)

    @property
    def epoch(self) -> int:
        """Return the epoch of the first batch that is not committed."""
        return self._committed.epoch

    @property
    def position(self) -> int:
        """Return the number of batches of this epoch that are committed."""
        return self._committed.batches

    @property
    def uncommitted(self) -> int:
        """Return the number of batches yielded and not committed, prefetched ones included."""
        return self._yielded_batches - self._committed_batches

    def commit(self, batches: int = 1) -> None:
        """Count that many more batches as finished with.

        Raises:
            RequestError: There are more than were yielded.
        """
        check_number("batches", batches, 0, max(self.uncommitted, 0))
        self._uses_commit = True
        self._committed = self._plan.advance(self._committed, batches)
        self._committed_batches += batches

    def differences(self, state: Mapping[str, object]) -> list[Difference]:
        """Return every difference between a saved state's settings and this sampler's; changes nothing.

        Raises:
            MismatchError: The state is not one of a sampler or loader, or names an unknown order.
            RequestError: The rest of the epoch cannot be divided among the ranks.
        """
        return compare_record(parse_record(state), self._plan, streams=_NO_STREAMS)

    def state_dict(self) -> dict[str, object]:
        """Return the committed position and the settings it depends on, as plain values.

        Raises:
            RequestError: Batches were yielded and none was ever committed: no position would be true.
        """
        if self.uncommitted and not self._uses_commit:
            raise RequestError(
                "the sampler was never told which batches are finished with",
                where="ResumableSampler.state_dict",
                expected="commit() after each batch",
                found=f"{self.uncommitted} batches yielded, some of them perhaps only prefetched",
                remedy="Call sampler.commit() after each update, or use ResumableLoader.",
            )
        return record_position(
            self._plan, self._committed, handed=self._committed_batches, ahead=0, streams=_NO_STREAMS
        ).to_plain()

    def load_state_dict(self, state: Mapping[str, object], *, permit: frozenset[str] = frozenset()) -> None:
        """Go to a saved position; a running iterator ends with an error at its next batch.

        Raises:
            MismatchError: Another data set or order, not permitted by its word; nothing was changed.
            RequestError: The rest of the epoch cannot be divided among the ranks; nothing was changed.
        """
        record = parse_record(state)
        differences = compare_record(record, self._plan, streams=_NO_STREAMS)
        position = resume_position(self._plan, record, differences, permit)
        self._yielded = self._committed = position
        self._yielded_batches = self._committed_batches = record.handed - record.ahead
        self._pass += 1

    def _rest(self, number: int, start: Position) -> Iterator[list[int]]:
        for batch in self._plan.rest_of_epoch(start):
            if number != self._pass:
                raise RequestError(
                    "this iterator is no longer the sampler's own: a state was loaded or another one was made",
                    where="ResumableSampler",
                    remedy="Make a new iterator; it starts at the sampler's position.",
                )
            self._yielded = self._plan.advance(self._yielded, 1)
            self._yielded_batches += 1
            yield batch.indices
