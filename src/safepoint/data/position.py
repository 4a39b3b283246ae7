"""Positions in the input, and the record of one that a checkpoint keeps.

Invariants:

1. A position is always the start of a batch that is still to come: after the last batch of an epoch it is the start of
   the next epoch, so that no pass over the rest of an epoch is empty.
2. A position counts samples of the global order. Batches are cut from there on, so a changed batch size or world size
   uses every sample of the epoch exactly once.
3. A record is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from safepoint.data.dataset import DatasetIdentity
from safepoint.data.order import KNOWN_ORDERS, GlobalOrder, check_number, order_version, share_of_batch
from safepoint.errors import Difference, FormatVersionError, MismatchError, RequestError

RECORD_VERSION = 1
# These change how batches are cut or which random numbers are drawn; each sample is still used once, in the same order.
ORDER_KEEPING_WORDS = frozenset({"world_size", "global_batch", "rng"})

_LARGEST = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Position:
    """Name the start of a batch: `samples` and `batches` of this epoch lie before it, over all ranks."""

    epoch: int = 0
    samples: int = 0
    batches: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """Name one rank's part of a batch: the indices at the positions from `start` on in the order of `epoch`."""

    epoch: int
    start: int
    indices: list[int]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Cut the order of each epoch into global batches, and each of these into one part a rank.

    `batch_size` is per rank.

    Raises:
        RequestError: A setting is outside its range, or an epoch has no batch, or a last batch too small for the ranks.
    """

    dataset: DatasetIdentity
    seed: int
    shuffle: bool
    drop_last: bool
    batch_size: int
    rank: int
    world_size: int

    def __post_init__(self) -> None:
        check_number("seed", self.seed, 0, (1 << 64) - 1)
        check_number("batch_size", self.batch_size, 1, _LARGEST)
        check_number("world_size", self.world_size, 1, _LARGEST)
        check_number("rank", self.rank, 0, self.world_size - 1)
        check_number("the length of the data set", self.dataset.length, 1, _LARGEST)
        if self.batches_per_epoch == 0:
            raise RequestError(
                "no batch can be made, because the last short one is dropped",
                where=self.dataset.name,
                expected=f"at least {self.global_batch} samples for one global batch",
                found=f"{self.dataset.length} samples",
                remedy="Use a smaller batch, or drop_last=False.",
            )
        self.check_tail(Position())

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.world_size

    @property
    def batches_per_epoch(self) -> int:
        return self._batches_in(self.dataset.length)

    def order(self, epoch: int) -> GlobalOrder:
        """Return the order of one epoch."""
        return GlobalOrder(self.dataset.length, seed=self.seed, epoch=epoch, shuffle=self.shuffle)

    def remaining(self, position: Position) -> int:
        """Return the number of batches from a position to the end of its epoch."""
        return self._batches_in(self.dataset.length - position.samples)

    def advance(self, position: Position, batches: int) -> Position:
        """Return the position that many batches later, in a later epoch if need be."""
        while (left := self.remaining(position)) <= batches:
            batches -= max(left, 0)
            position = Position(position.epoch + 1)
        return Position(position.epoch, position.samples + batches * self.global_batch, position.batches + batches)

    def batch_at(self, position: Position) -> Batch:
        """Return this rank's part of the batch that starts at a position."""
        stop = min(position.samples + self.global_batch, self.dataset.length)
        share = share_of_batch(position.samples, stop, rank=self.rank, world_size=self.world_size)
        return Batch(position.epoch, share.start, self.order(position.epoch).block(share.start, share.stop))

    def samples_in(self, position: Position, batches: int) -> int:
        """Return the number of this rank's samples in so many batches from a position on."""
        number = 0
        for _ in range(batches):
            stop = min(position.samples + self.global_batch, self.dataset.length)
            share = share_of_batch(position.samples, stop, rank=self.rank, world_size=self.world_size)
            number += share.stop - share.start
            position = self.advance(position, 1)
        return number

    def total_in(self, position: Position, batches: int) -> int:
        """Return the number of samples of all ranks in so many batches from a position on."""
        number = 0
        for _ in range(batches):
            number += min(self.global_batch, self.dataset.length - position.samples)
            position = self.advance(position, 1)
        return number

    def rest_of_epoch(self, position: Position) -> Iterator[Batch]:
        """Yield this rank's part of each batch from a position to the end of its epoch."""
        for _ in range(self.remaining(position)):
            yield self.batch_at(position)
            position = self.advance(position, 1)

    def check_tail(self, position: Position) -> None:
        """Raise `RequestError` if the epoch of a position ends in a batch of fewer samples than ranks.

        Some rank would have no batch where the others have one, and they would wait for it for ever.
        """
        tail = (self.dataset.length - position.samples) % self.global_batch
        if not self.drop_last and 0 < tail < self.world_size:
            raise RequestError(
                "the last batch of the epoch has fewer samples than there are ranks",
                where=f"{self.dataset.name}, from sample {position.samples} of epoch {position.epoch}",
                expected=f"at least {self.world_size} samples, one a rank",
                found=f"{tail}",
                remedy="Use drop_last=True, another batch size, or another number of ranks.",
            )

    def _batches_in(self, samples: int) -> int:
        return samples // self.global_batch if self.drop_last else -(-samples // self.global_batch)


@dataclass(frozen=True, slots=True)
class PositionRecord:
    """Hold what a checkpoint says of a position, and of the settings that give it a meaning.

    `handed` counts the batches handed out in the whole run, of which the last `ahead` lie behind `samples` and
    `batches`: they will be handed out again. `streams` names how the random streams of samples are seeded.
    """

    order: str
    seed: int
    shuffle: bool
    drop_last: bool
    epoch: int
    samples: int
    batches: int
    batch_size: int
    world_size: int
    global_batch: int
    handed: int
    ahead: int
    streams: str
    dataset: DatasetIdentity

    def position(self) -> Position:
        return Position(self.epoch, self.samples, self.batches)

    def to_plain(self) -> dict[str, object]:
        """Return the record as plain values; `parse_record` reads them."""
        plain: dict[str, object] = {"version": RECORD_VERSION}
        plain.update({one.name: getattr(self, one.name) for one in fields(self)})
        plain["dataset"] = {one.name: getattr(self.dataset, one.name) for one in fields(DatasetIdentity)}
        return plain


def record_position(plan: BatchPlan, position: Position, *, handed: int, ahead: int, streams: str) -> PositionRecord:
    """Return the record of a position under a plan."""
    return PositionRecord(
        order=order_version(shuffle=plan.shuffle),
        seed=plan.seed,
        shuffle=plan.shuffle,
        drop_last=plan.drop_last,
        epoch=position.epoch,
        samples=position.samples,
        batches=position.batches,
        batch_size=plan.batch_size,
        world_size=plan.world_size,
        global_batch=plan.global_batch,
        handed=handed,
        ahead=ahead,
        streams=streams,
        dataset=plan.dataset,
    )


def parse_record(state: object) -> PositionRecord:
    """Return the record that a state holds.

    Raises:
        FormatVersionError: A newer version of safepoint wrote the state.
        MismatchError: The state is not one of this kind of loader, lacks a part, or names an order that is not known.
    """
    if not isinstance(state, Mapping):
        raise _not_ours("state", "a mapping", state)
    version = state.get("version")
    if type(version) is int and version > RECORD_VERSION:
        raise FormatVersionError(
            "the position in the data was recorded by a newer version of safepoint",
            expected=f"version {RECORD_VERSION} or older",
            found=version,
            remedy="Upgrade safepoint.",
        )
    if version != RECORD_VERSION or type(version) is not int:
        raise _not_ours("version", str(RECORD_VERSION), version)
    names = {one.name for one in fields(PositionRecord)}
    _check_keys(state, names | {"version"}, "the state of a loader")
    identity = state["dataset"]
    if not isinstance(identity, Mapping):
        raise _not_ours("dataset", "a mapping", identity)
    _check_keys(identity, {one.name for one in fields(DatasetIdentity)}, "the data set of a loader's state")
    fingerprint = identity["fingerprint"]
    record = PositionRecord(
        order=_text(state, "order"),
        seed=_whole(state, "seed", most=(1 << 64) - 1),
        shuffle=_flag(state, "shuffle"),
        drop_last=_flag(state, "drop_last"),
        epoch=_whole(state, "epoch"),
        samples=_whole(state, "samples"),
        batches=_whole(state, "batches"),
        batch_size=_whole(state, "batch_size"),
        world_size=_whole(state, "world_size"),
        global_batch=_whole(state, "global_batch"),
        handed=_whole(state, "handed"),
        ahead=_whole(state, "ahead"),
        streams=_text(state, "streams"),
        dataset=DatasetIdentity(
            _text(identity, "name"),
            _whole(identity, "length"),
            None if fingerprint is None else _text(identity, "fingerprint"),
        ),
    )
    if record.ahead > record.handed:
        raise _not_ours("ahead", f"at most the {record.handed} handed out", record.ahead)
    if record.global_batch != record.batch_size * record.world_size or record.global_batch == 0:
        raise _not_ours("global_batch", "batch_size times world_size", record.global_batch)
    if not record.batches <= record.samples < max(record.dataset.length, 1):
        within = f"from {record.batches} batches on, within {record.dataset.length}"
        raise _not_ours("samples", f"a position {within}", record.samples)
    if record.order not in KNOWN_ORDERS:
        raise MismatchError(
            "the order of the samples was computed by an algorithm that this version does not know",
            where="order",
            expected=" or ".join(sorted(KNOWN_ORDERS)),
            found=repr(record.order),
            remedy="Resume with the version of safepoint that saved it.",
        )
    return record


def compare_record(record: PositionRecord, plan: BatchPlan, *, streams: str) -> list[Difference]:
    """Return every difference between the settings of a record and the live ones.

    Raises:
        RequestError: Only the cutting into batches differs, and the rest of the epoch cannot be divided among ranks.
    """
    saved, now = record.dataset, plan.dataset
    sides = [
        ("dataset", "name of the data set", saved.name, now.name),
        ("dataset", "length of the data set", saved.length, now.length),
        ("dataset", "fingerprint of the data set", saved.fingerprint, now.fingerprint),
        ("dataset.order", "seed of the order", record.seed, plan.seed),
        ("dataset.order", "order of the samples", record.order, order_version(shuffle=plan.shuffle)),
        ("dataset.order", "drop_last", record.drop_last, plan.drop_last),
        ("world_size", "world size of the loader", record.world_size, plan.world_size),
        ("global_batch", "samples in a global batch", record.global_batch, plan.global_batch),
        ("rng", "random streams of samples", record.streams, streams),
    ]
    found = [Difference(word, subject, str(was), str(is_)) for word, subject, was, is_ in sides if was != is_]
    if all(one.word in ORDER_KEEPING_WORDS for one in found):
        # No permit mends this, so it must be said while nothing is touched yet.
        plan.check_tail(plan.advance(record.position(), 0))
    return found


def resume_position(
    plan: BatchPlan, record: PositionRecord, differences: list[Difference], permit: frozenset[str]
) -> Position:
    """Return the position at which a plan goes on from a record.

    Raises:
        MismatchError: A difference that changes which samples come, or their order, is not permitted.
        RequestError: The rest of the epoch cannot be divided among the ranks.
    """
    refused = [one for one in differences if one.word not in permit | ORDER_KEEPING_WORDS]
    if refused:
        raise MismatchError(
            "the data set or its order is not the one of the checkpoint",
            where=plan.dataset.name,
            differences=refused,
            remedy="Use the data set and settings of the saved run, or permit the change by its word.",
        )
    position = plan.advance(record.position(), 0)
    plan.check_tail(position)
    return position


def _check_keys(state: Mapping[str, object], expected: set[str], what: str) -> None:
    missing, foreign = sorted(expected - set(state)), sorted(map(str, set(state) - expected))
    if missing or foreign:
        raise MismatchError(
            f"{what} does not have the parts it needs",
            expected=", ".join(sorted(expected)),
            found=f"missing: {', '.join(missing) or 'none'}; not known: {', '.join(foreign) or 'none'}",
            remedy="Restore it into the kind of loader that saved it.",
        )


def _text(state: Mapping[str, object], name: str) -> str:
    value = state[name]
    if not isinstance(value, str):
        raise _not_ours(name, "a text", value)
    return value


def _flag(state: Mapping[str, object], name: str) -> bool:
    value = state[name]
    if not isinstance(value, bool):
        raise _not_ours(name, "True or False", value)
    return value


def _whole(state: Mapping[str, object], name: str, most: int = _LARGEST) -> int:
    value = state[name]
    if type(value) is not int or not 0 <= value <= most:
        raise _not_ours(name, f"an int from 0 to {most}", value)
    return value


def _not_ours(name: str, expected: str, found: object) -> MismatchError:
    return MismatchError(
        "a part of a loader's state is not what it must be",
        where=name,
        expected=expected,
        found=f"{type(found).__name__} {found!r}"[:120],
        remedy="Restore it into the kind of loader that saved it.",
    )
