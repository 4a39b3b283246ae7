"""Items: the named parts of the state, as the phases of saving and restoring see them.

The phases never see a tensor. They see a `Source`, which gives the bytes of one tensor (or of this rank's box of it),
and a `Target`, which takes them. This file knows nothing of torch, so that every crash of the protocol can be played
with items made of plain bytes.

How an item is restored: `check` (nothing is touched) → `targets` → each target is filled and its bytes are checked by
digest → `apply`. The caller applies items in the order of their types: modules first, random streams last.

What there is one of for each tensor is a msgspec record: making a frozen dataclass takes ten times as long. Nothing
that such a record holds refers back to it, so the collector of cycles is spared it.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol, runtime_checkable

import msgspec

from safepoint.errors import Difference, InternalError, TornSnapshotError
from safepoint.format.plain import decode_plain

# The item that holds the global random streams; captured without being asked, so its name is reserved.
STREAMS_ITEM = "rng"


class TensorSpec(msgspec.Struct, frozen=True, gc=False):
    """Describe one stored tensor, or one box of it.

    `shape` is that of the box, `global_shape` that of the whole tensor, `offset` where the box begins in it. On one
    process the box is the tensor. `dtype` is the true dtype by torch's name without the prefix, such as ``bfloat16``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]


class Place(msgspec.Struct, frozen=True, gc=False):
    """Name live host memory that holds a box's bytes just as they are stored.

    `writes` is how often it was written to, by a count that sees what goes through the framework and no more.
    """

    address: int
    writes: int


class Held(msgspec.Struct, frozen=True):
    """Name live host memory that holds a box's bytes just as they are stored, and keep it from being given back.

    `locate` returns where the storage begins now that they lie in, and keeps it; at first it was at `begin`. A tensor
    that is given other memory meanwhile leaves this one as it is. Only a storage that is resized takes its memory away.
    """

    address: int
    begin: int
    locate: Callable[[], int]

    @property
    def is_there(self) -> bool:
        """Return whether the memory was not given back."""
        return self.locate() == self.begin

    def check(self, where: str) -> None:
        """Raise `TornSnapshotError` if the memory was given back all the same."""
        if not self.is_there:
            raise TornSnapshotError(
                "a tensor's storage was resized between its boundary and the next step, before it was copied",
                where=where,
                remedy="Nothing was published. Resize it before after_update(), or call wait() first; or make the "
                "manager with copy_behind=False.",
            )


class Placed(Protocol):
    """A source that tells where its bytes lie."""

    def place(self) -> Place | None:
        """Return where the bytes lie in live memory; None where they do not lie there as they are stored."""

    def memory(self) -> memoryview:
        """Return that memory; asked only of what has a place."""


def placed(one: Any) -> Placed | None:
    """Return a source that tells where its bytes lie; None for one that does not."""
    # For many small tensors, asking isinstance() of a protocol takes longer than all else that is done with them.
    return one if hasattr(one, "place") else None


def is_temporary(one: Any) -> bool:
    """Return whether the memory of a target is given back when it is committed; it is, where the target does not say.

    A target says so by an attribute `is_in_place`.
    """
    return not getattr(one, "is_in_place", False)


class Source(Protocol):
    """Give the bytes of one box of a tensor: dense, C order, little-endian."""

    @property
    def nbytes(self) -> int:
        """Return the size in bytes."""

    def copy_into(self, buffer: memoryview) -> None:
        """Copy all bytes into a writable buffer of exactly `nbytes` bytes, and do as `check`.

        Must not draw random numbers or change state.
        """

    def in_place(self) -> memoryview | None:
        """Return the live memory, to be read while the source is held; None where it has another form than is stored.

        Whoever has read it calls `check`.
        """

    def check(self) -> None:
        """Raise `TornSnapshotError` if the tensor is known to have been written to since the boundary."""


class SourceType(Protocol):
    """A type of sources all of which can be asked at once: a call for each takes longer than to copy a small tensor."""

    def addresses(self, sources: Sequence[Any]) -> list[int]:
        """Return where the bytes of each lie now; 0 where they do not lie in host memory as they are stored."""

    def sizes(self, sources: Sequence[Any]) -> list[int]:
        """Return the size of each in bytes."""

    def hold(self, sources: Sequence[Any]) -> list[Held | None]:
        """Return where the bytes of each lie, and keep them there; None where `addresses` returns 0."""

    def are_unwritten(self, sources: Sequence[Any]) -> bool:
        """Return whether `check` would raise nothing for any; where it is not certain, no."""


def addresses_of(sources: Sequence[Source], sizes: Sequence[int]) -> list[int]:
    """Return where the bytes of each source lie now as they are stored; 0 where that cannot be told.

    Raises:
        InternalError: One that tells has another size than these.
    """
    found: list[int] = []
    for kind, run in _by_type(sources):
        if kind is not None:
            _check_sizes(kind.sizes(run), sizes[len(found) : len(found) + len(run)])
        found += [0] * len(run) if kind is None else kind.addresses(run)
    return found


def hold(sources: Sequence[Source], sizes: Sequence[int]) -> list[Held | None]:
    """Return where the bytes of each source lie, and keep them there; None where that cannot be told.

    Raises:
        InternalError: One that tells has another size than these.
    """
    found: list[Held | None] = []
    for kind, run in _by_type(sources):
        if kind is not None:
            _check_sizes(kind.sizes(run), sizes[len(found) : len(found) + len(run)])
        found += [None] * len(run) if kind is None else kind.hold(run)
    return found


def are_unwritten(sources: Sequence[Source]) -> bool:
    """Return whether `check` would raise nothing for any source; where it is not certain, no."""
    return all(kind is not None and kind.are_unwritten(run) for kind, run in _by_type(sources))


def _by_type(sources: Sequence[Source]) -> Iterator[tuple[SourceType | None, list[Source]]]:
    """Yield runs of sources of one type, and that type if many can be asked at once."""
    for kind, run in groupby(sources, type):
        # Asking isinstance() of a protocol takes longer.
        asked: Any = kind if hasattr(kind, "are_unwritten") else None
        yield asked, list(run)


def _check_sizes(found: Sequence[int], expected: Sequence[int]) -> None:
    if found != expected:
        raise InternalError("sources have other bytes than their boxes", expected=expected, found=found)


class Target(Protocol):
    """Take the bytes of one box of a tensor.

    The reader fills `memory()`, checks the digest of what it filled, and then calls `commit()`. For a tensor in host
    memory `memory()` is the tensor's own storage and `commit()` has nothing left to do.
    """

    @property
    def nbytes(self) -> int:
        """Return the size in bytes."""

    def memory(self) -> memoryview:
        """Return writable host memory of exactly `nbytes` bytes, valid until `commit`."""

    def commit(self) -> Place | None:
        """Move the filled bytes to where they belong, and let go of temporary memory.

        Returns where they lie now, if it is the very memory that was filled; None where it is not, or is not known.
        """


class BoxTarget(Target, Protocol):
    """Take the bytes of one box that this rank holds of a tensor held in parts: dense, C order.

    Boxes of one tensor do not overlap. Where the live memory is one contiguous box, `memory()` is the live memory.
    """

    @property
    def offset(self) -> tuple[int, ...]:
        """Return where the box begins in the whole tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the lengths of the box; one without elements takes no bytes."""


@runtime_checkable
class ShardedTarget(Protocol):
    """Take a tensor of which this rank holds parts: none, one or several boxes, each a target of its own.

    All boxes are filled and committed like any other target before the item is applied.
    """

    def boxes(self) -> Sequence[BoxTarget]:
        """Return the boxes; the same objects at each call."""


# What an item returns for a stored tensor: a target of the whole, or of this rank's boxes of it.
TensorTarget = Target | ShardedTarget


@runtime_checkable
class Divisible(Protocol):
    """A source of which a part can be read alone."""

    def rows(self, start: int, stop: int) -> Source:
        """Return the source of a half-open range of rows, counted along the first axis."""


@runtime_checkable
class Summable(Protocol):
    """A source whose elements can be added up where they lie."""

    def checksum(self) -> int:
        """Return the sum of the elements, taken as signed integers of their size or, above 8 bytes, of 8, modulo 2^64.

        Must not draw random numbers or change state.
        """


class CapturedTensor(msgspec.Struct, frozen=True, gc=False):
    """Pair what a tensor is with where its bytes come from.

    A tensor of which a rank holds several boxes is several of these, of one name and different offsets. Where several
    ranks hold a box that `is_leaders`, they may differ, and the lowest rank's bytes count.
    """

    spec: TensorSpec
    source: Source
    is_leaders: bool = False


@dataclass(frozen=True, slots=True)
class Owned:
    """Tell what belongs to optimizers that have stepped in the update just finished: it changes when they step again.

    `optimizers` are their items; `begins` and `ends` the half-open ranges of addresses of their parameters, sorted.
    """

    optimizers: frozenset[str] = frozenset()
    begins: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    def among(self, tensors: Iterable[tuple[str, str, int, int]]) -> list[bool]:
        """Return which of some captured tensors are such parameters, or the state of such an optimizer.

        Args:
            tensors: Item, name, address and size in bytes of each.
        """
        return [
            # The other tensors of an optimizer are options, which a schedule may set.
            name.startswith("state/") if item in self.optimizers else self._has(address, size_bytes)
            for item, name, address, size_bytes in tensors
        ]

    def _has(self, address: int, size_bytes: int) -> bool:
        number = bisect.bisect_right(self.begins, address) - 1
        return number >= 0 and address + size_bytes <= self.ends[number]


@dataclass(frozen=True, slots=True)
class CapturedItem:
    """Hold one item at a boundary: a plain tree (see `safepoint.format.plain`) as text, and the tensors it names.

    `division` tells in a line how its distributed tensors are divided over ranks, those of which this rank holds no
    box among them; empty if it has none. Equal texts are equal divisions. An optimizer says nothing of it: its state
    is divided as its parameters are.
    `leaders` are the entries of the tree that may differ between ranks as `CapturedTensor.is_leaders` says.
    """

    type: str
    tree: bytes
    tensors: tuple[CapturedTensor, ...] = ()
    division: str = ""
    leaders: frozenset[str] = frozenset()

    @property
    def plain(self) -> object:
        """Return the plain tree."""
        return decode_plain(msgspec.json.decode(self.tree), where=f"a captured {self.type}")


@dataclass(frozen=True, slots=True)
class SavedItem:
    """Hold what a checkpoint says of one item, before any tensor byte is read."""

    type: str
    plain: object
    specs: Mapping[str, TensorSpec] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Permits:
    """Say which differences a restore accepts, and which side wins.

    `words` are the words of `Contract(permit=...)`; `current` is the subset for which the live value wins over the
    saved one.
    """

    words: frozenset[str] = frozenset()
    current: frozenset[str] = frozenset()


class Item(Protocol):
    """Capture and restore one named part of the state. One adapter per kind of live object implements it."""

    @property
    def name(self) -> str:
        """Return the item's name, as registered."""

    @property
    def type(self) -> str:
        """Return the type recorded in the checkpoint, such as ``module``; a restore into another type is a mismatch."""

    def capture(self) -> CapturedItem:
        """Return the state now. The sources refer to live memory: they are read before the boundary is left.

        Draws no random number and changes nothing. Raises `RequestError` for a value that cannot be stored, by its
        path.
        """

    def check(self, saved: SavedItem) -> Sequence[Difference]:
        """Compare what was saved with the live object and return every difference; touches nothing."""

    def targets(self, saved: SavedItem, permits: Permits) -> Mapping[str, TensorTarget]:
        """Return a target for each stored tensor that shall be read, by name. Touches nothing yet."""

    def apply(self, saved: SavedItem, permits: Permits) -> Sequence[str]:
        """Set the live object from the saved plain tree and the committed targets.

        Returns what was deliberately left as it is (names of parameters and slots), for the report.
        """


@runtime_checkable
class Preparing(Protocol):
    """An item whose live object may have another form than the one that is captured and restored into."""

    def prepare(self) -> None:
        """Bring the live object into that form, its values unchanged; raises nothing that one rank alone may meet."""


@runtime_checkable
class Forgetting(Protocol):
    """An item that keeps what it saw of its live object from `check` to `apply`."""

    def forget(self) -> None:
        """Let go of it, also where the restore ended in between."""


@runtime_checkable
class Derivable(Protocol):
    """An item of random streams, which can be begun anew."""

    def derive(self, seed_of: Callable[[str], int]) -> object | None:
        """Return a plain tree with each stream begun anew; None where that cannot be done.

        Touches nothing and draws nothing. `seed_of` gives the seed, below 2**64, of a stream by its name.
        """
