"""Divide: who writes which box, as a pure function of the ranks' layouts.

1. A box that one rank alone holds is written by that rank.
2. A box that several ranks hold is written once. Boxes are divided so that, as far as the sets of holders allow, all
   ranks write the same number of bytes; a box is cut into row ranges where that is needed.
3. Of a box that is the leader's, or whose holders may hold other bytes, the lowest holder writes all.
4. What is planned tiles every tensor exactly, or the save is refused here.

Spec: C2, C5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import msgspec
import numpy

from safepoint.errors import AbortedError, CorruptionError
from safepoint.format.blocks import Block, Flags, Inventory
from safepoint.format.columns import Columns
from safepoint.format.dtypes import DTYPES
from safepoint.format.extent import element_count
from safepoint.format.tiling import Column, check_tilings
from safepoint.saving.form import boxes_digest
from safepoint.saving.layout import CutDigests, Layout, columns_of
from safepoint.saving.parts import PartMessage, RankPart, ReplicaRanges, Share, decode_part, ranges_of, written
from safepoint.saving.sharing import HolderSet, Pieces, find_sets, find_shared, give, no_pieces, spread


@dataclass(frozen=True, slots=True)
class Division:
    """Hold the part of each rank.

    `parts` are the messages that tell each rank what it writes, `digests` those of the boxes that it then stores.
    `holders` are the ranks of each replica set, `box_counts` the number of its boxes, `leaders` the sets that are the
    leader's. `tensor_counts` and `sizes_bytes` are what is stored of each item.
    """

    parts: tuple[bytes, ...]
    digests: tuple[str, ...]
    holders: tuple[tuple[int, ...], ...]
    box_counts: tuple[int, ...]
    leaders: frozenset[int]
    tensor_counts: dict[str, int]
    sizes_bytes: dict[str, int]


def divide(layouts: Sequence[Columns], per_rank: frozenset[str], *, spreads: bool = True) -> Division:
    """Return who writes what.

    Args:
        layouts: The layout of each rank.
        per_rank: The items of which each rank writes its own.
        spreads: Whether the holders of a box are known to hold the same, so that each may write some of it; if not,
            rows of several holders could make a mixture that no rank ever had.

    Raises:
        AbortedError: Ranks hold tensors of different types or shapes under one name, or their boxes do not make a
            whole; the tensor is named.

    Spec: C2, C5.
    """
    try:
        inventory = Inventory(layouts, per_rank)
    except CorruptionError as exc:
        raise AbortedError(exc.message, where=exc.where, expected=exc.expected, found=exc.found) from exc
    loads = numpy.zeros(len(layouts), numpy.int64)
    counts, sizes = _own(inventory, loads)
    is_alone = numpy.zeros(int(inventory.bases[-1]), numpy.bool_)
    shared = find_shared(inventory, is_alone, loads)
    sets = find_sets(inventory, shared)
    pieces = [no_pieces()]
    for one in sets:
        pieces.append(give(inventory, shared, one, loads, spreads=spreads))
    for one in sets:
        if spreads and not one.is_leaders:
            pieces.append(spread(inventory, shared, one, loads))
    joined = Pieces.joined(pieces)
    _prove(inventory, is_alone, joined)
    for tensor in inventory.tensors:
        counts[tensor.item] = counts.get(tensor.item, 0) + 1
        size_bytes = element_count(tensor.global_shape) * DTYPES[tensor.dtype].size_bytes
        sizes[tensor.item] = sizes.get(tensor.item, 0) + size_bytes
    parts, digests = _told(inventory, is_alone, joined, sets)
    return Division(
        parts,
        digests,
        tuple(one.holders for one in sets),
        tuple(len(one.places) for one in sets),
        frozenset(number for number, one in enumerate(sets) if one.is_leaders),
        counts,
        sizes,
    )


def divide_alone(layout: Layout) -> tuple[Division, RankPart]:
    """Return the division of one process, which writes all it holds, and its part.

    Raises:
        AbortedError: As `divide` does.
    """
    boxes = layout.boxes
    names = set(map(attrgetter("item", "name"), boxes))
    offsets = set(map(attrgetter("offset"), boxes))
    are_whole = list(map(attrgetter("shape"), boxes)) == list(map(attrgetter("global_shape"), boxes))
    if len(names) < len(boxes) or not are_whole or any(map(any, offsets)):
        division = divide([columns_of(layout)], frozenset())
        part = decode_part(division.parts[0], layout, where="rank 0")
        return replace(division, digests=(boxes_digest(written(layout, part)),)), part
    # Each box is a tensor of its own, and whole: there is nothing to be proven.
    counts, sizes = Counter(map(attrgetter("item"), boxes)), Counter[str]()
    for (item, dtype, shape), count in Counter(map(attrgetter("item", "dtype", "shape"), boxes)).items():
        sizes[item] += count * element_count(shape) * DTYPES[dtype].size_bytes
    message = msgspec.msgpack.encode(PartMessage(((0, len(boxes)),) if boxes else (), (), ()))
    division = Division((message,), (boxes_digest(boxes),), (), (), frozenset(), dict(counts), dict(sizes))
    return division, RankPart(tuple(range(len(boxes))))


def _own(inventory: Inventory, loads: Column) -> tuple[dict[str, int], dict[str, int]]:
    """Add the bytes of ranks' own items to their loads, and return how many tensors and bytes each such item has."""
    counts: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for layout, ranks in enumerate(inventory.ranks):
        columns = inventory.layouts[layout]
        names: set[tuple[str, str]] = set()
        for number in inventory.own_boxes(layout):
            tensor, end = columns.frame.tensors[number], columns.frame.ends[number]
            shape = columns.table[1, end - len(tensor.global_shape) : end].tolist()
            size_bytes = element_count(shape) * DTYPES[tensor.dtype].size_bytes
            loads[list(ranks)] += size_bytes
            sizes[tensor.item] = sizes.get(tensor.item, 0) + size_bytes * len(ranks)
            names.add((tensor.item, tensor.name))
        for item, _ in names:
            counts[item] = counts.get(item, 0) + len(ranks)
    return counts, sizes


def _prove(inventory: Inventory, is_alone: Flags, pieces: Pieces) -> None:
    """Prove that what all ranks together write makes each tensor whole."""
    tensors = inventory.tensors_of(pieces.keys)
    order = numpy.argsort(tensors, kind="stable")
    tensors = tensors[order]
    for block in inventory.blocks():
        own = order[numpy.searchsorted(tensors, block.first) : numpy.searchsorted(tensors, block.last)]
        is_written = is_alone[block.keys]
        if len(own) or not is_written.all():
            block = _cut(block, numpy.flatnonzero(is_written), pieces, own)
        named = inventory.tensors[block.first : block.last]
        wholes = [(f"{tensor.item}/{tensor.name}", tensor.global_shape) for tensor in named]
        try:
            check_tilings(wholes, block.tensors - block.first, block.offsets, block.shapes)
        except CorruptionError as exc:
            raise AbortedError("the ranks' parts do not make a whole tensor", where=exc.where, found=str(exc)) from exc


def _cut(block: Block, alone: Column, pieces: Pieces, own: Column) -> Block:
    """Return what is written of a block: boxes that one rank holds, and pieces."""
    by_key = numpy.argsort(block.keys)
    places = by_key[numpy.searchsorted(block.keys, pieces.keys[own], sorter=by_key)]
    block = block.only(numpy.concatenate([alone, places]))
    cut = numpy.flatnonzero(~pieces.is_whole[own])
    if len(cut):
        starts, stops = pieces.starts[own[cut]], pieces.stops[own[cut]]
        block.offsets[0, len(alone) + cut] += starts
        block.shapes[0, len(alone) + cut] = stops - starts
    return block


def _told(
    inventory: Inventory, is_alone: Flags, pieces: Pieces, sets: Sequence[HolderSet]
) -> tuple[tuple[bytes, ...], tuple[str, ...]]:
    """Return by rank what it is told, and the digest of what it then stores."""
    replicas: list[list[ReplicaRanges]] = [[] for _ in inventory.layouts]
    for number, one in enumerate(sets):
        for layout, keys in zip(one.layouts.tolist(), one.keys.T, strict=True):
            ranges = ranges_of(keys - inventory.bases[layout])
            replicas[layout].append(ReplicaRanges(number, one.is_leaders, ranges))
    digests = CutDigests()
    parts, found = [], []
    ends = numpy.searchsorted(pieces.ranks, numpy.arange(len(inventory.layout_of)), "right").tolist()
    for begin, end, layout in zip([0, *ends], ends, inventory.layout_of.tolist(), strict=False):
        first, last = inventory.bases[layout], inventory.bases[layout + 1]
        is_whole = is_alone[first:last].copy()
        is_whole[inventory.own_boxes(layout)] = True
        keys, cut = pieces.keys[begin:end], ~pieces.is_whole[begin:end]
        is_whole[keys[~cut] - first] = True
        wholes = numpy.flatnonzero(is_whole)
        cuts = numpy.stack([keys[cut] - first, pieces.starts[begin:end][cut], pieces.stops[begin:end][cut]])
        shares = tuple(Share(*share) for share in cuts.T.tolist())
        parts.append(msgspec.msgpack.encode(PartMessage(ranges_of(wholes), shares, tuple(replicas[layout]))))
        found.append(digests.digest(inventory.layouts[layout], wholes, cuts))
    return tuple(parts), tuple(found)
