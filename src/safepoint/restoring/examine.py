"""Examine: what one rank finds in the indexes that it reads for all, and what it tells the leader of them.

1. Each index is read by one rank, once. With as many ranks as there were, that is the rank that wrote it.
2. An index is the one that the manifest names, is sound in itself, and names items of the manifest. What only all
   indexes together can tell is the leader's to prove, from the boxes in columns and from shares of digests.
3. Of an index that has been looked at, boxes are kept in columns, and those plain trees that a rank may be asked for.

Spec: C10.6, C11.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import msgspec

from safepoint.format.blocks import Inventory
from safepoint.format.chunks import IndexReader
from safepoint.format.columns import Columns, encode_columns
from safepoint.format.digest import digest_bytes
from safepoint.format.index import Index, ObjectReference, Tensor
from safepoint.format.manifest import Manifest
from safepoint.format.state_digest import add_digests, item_digest, rank_share
from safepoint.format.tiling import check_tilings
from safepoint.restoring.stored import StoredIndex
from safepoint.restoring.validate import check_items_of, contradiction, decode_text, read_text
from safepoint.storage.base import Storage

# Texts that are read ahead of the one that is looked at, and their bytes.
_READ_AHEAD = 8
_READ_AHEAD_BYTES = 32 << 20


class ItemReport(msgspec.Struct, frozen=True, array_like=True):
    """Say what some indexes list of an item.

    `trees` is the number of plain trees. `boxes` is the sum of the digests of boxes, `own` that of trees as each rank's
    own; `common` is the digest of the one tree as that of all ranks.
    """

    trees: int = 0
    boxes: str = add_digests(())
    own: str = add_digests(())
    common: str = add_digests(())

    def joined(self, other: ItemReport) -> ItemReport:
        """Return what both say; `common` has a meaning only where there is one tree."""
        pairs = ((self.boxes, other.boxes), (self.own, other.own), (self.common, other.common))
        return ItemReport(self.trees + other.trees, *map(add_digests, pairs))


class ToldBoxes(msgspec.Struct, frozen=True, array_like=True):
    """Hold the boxes of one index on their way to the leader."""

    rank: int
    digest: str
    columns: bytes


class Report(msgspec.Struct, frozen=True, array_like=True):
    """Tell the leader of some indexes.

    `trees` names, by item that is not each rank's own, the rank that first has a plain tree, and the tree's digest, for
    each tree that is another one.
    """

    objects: tuple[ObjectReference, ...]
    items: dict[str, ItemReport]
    trees: dict[str, tuple[tuple[int, str], ...]]
    boxes: tuple[ToldBoxes, ...]


@dataclass(frozen=True, slots=True)
class Share:
    """Hold the indexes that one rank has read, and the plain trees of them that it keeps, by item and rank."""

    indexes: tuple[StoredIndex, ...]
    trees: Mapping[str, Mapping[int, Any]]
    objects: tuple[ObjectReference, ...]
    items: Mapping[str, ItemReport]

    def report(self, manifest: Manifest, *, with_boxes: bool) -> Report:
        """Return what the leader is told."""
        firsts: dict[str, tuple[tuple[int, str], ...]] = {}
        for name, trees in self.trees.items():
            if manifest.items[name].kind != "per_rank":
                found: dict[str, int] = {}
                for rank, tree in trees.items():
                    found.setdefault(_digest_of(tree), rank)
                firsts[name] = tuple((rank, digest) for digest, rank in found.items())
        told = [(index.rank, index.boxes) for index in self.indexes] if with_boxes else []
        boxes = tuple(ToldBoxes(rank, one.digest, encode_columns(one)) for rank, one in told)
        return Report(self.objects, dict(self.items), firsts, boxes)


def share_of(rank: int, world_size: int, saved: int) -> range:
    """Return the ranks whose indexes a rank reads, of so many that saved."""
    return range(saved * rank // world_size, saved * (rank + 1) // world_size)


def examine_share(
    storage: Storage,
    manifest: Manifest,
    references: Sequence[ObjectReference],
    ranks: Sequence[int],
    *,
    keeps_own: bool,
) -> Share:
    """Read some ranks' indexes, and return what they hold, having checked all that they tell for themselves.

    Args:
        storage: Where the run lies.
        manifest: The manifest, for its items.
        references: What the manifest says of the ranks' indexes, in their order.
        ranks: Whose indexes.
        keeps_own: Whether plain trees of ranks' own items are kept, since these ranks are those of the job.

    Raises:
        CorruptionError: One is damaged, or not the one that the manifest names, or contradicts it.
        ObjectMissingError: One is not there.

    Spec: C11.
    """
    reader, indexes = IndexReader(), []
    objects: dict[ObjectReference, None] = {}
    items: dict[str, ItemReport] = {}
    trees: dict[str, dict[int, Any]] = {}
    known: set[tuple[str, str]] = set()
    for rank, text in zip(ranks, _texts(storage, references), strict=True):
        index = decode_text(manifest, rank, text, are_boxes_sound=reader.are_boxes_sound)
        check_items_of(manifest, index)
        stored = StoredIndex.of(index, reader.columns_of(index), keeps_records=len(ranks) == 1)
        _check_own(manifest, stored)
        indexes.append(stored)
        objects.update(dict.fromkeys(index.objects))
        for name, found in _reports(manifest, index).items():
            items[name] = items.get(name, ItemReport()).joined(found)
        for name, item in index.items.items():
            if not keeps_own:
                key = name, _digest_of(item.plain)
                if manifest.items[name].kind == "per_rank" or key in known:
                    continue
                known.add(key)
            trees.setdefault(name, {})[rank] = item.plain
    return Share(tuple(indexes), trees, tuple(objects), items)


def check_whole_of(columns: Sequence[Columns], left_out: frozenset[str], *, where: str) -> None:
    """Raise `CorruptionError` unless the boxes of all tensors, but those of items left out, make them whole.

    Spec: C5.1.
    """
    if len(columns) == 1 and _are_wholes(columns[0]):
        return
    inventory = Inventory(columns, left_out)
    for block in inventory.blocks():
        named = inventory.tensors[block.first : block.last]
        wholes = [(f"{where}: {tensor.item}/{tensor.name}", tensor.global_shape) for tensor in named]
        check_tilings(wholes, block.tensors - block.first, block.offsets, block.shapes)


def _are_wholes(columns: Columns) -> bool:
    """Return whether each box is a tensor of its own, whole, as those of one process are."""
    tensors, (offsets, lengths) = columns.frame.tensors, columns.table
    names = {(tensor.item, tensor.name) for tensor in tensors}
    wholes = list(chain.from_iterable(tensor.global_shape for tensor in tensors))
    return len(names) == len(tensors) and not offsets.any() and lengths.tolist() == wholes


def _texts(storage: Storage, references: Sequence[ObjectReference]) -> Iterator[bytes]:
    """Yield the texts of indexes; a few are read ahead where there are several."""
    if len(references) < 2:
        yield from (read_text(storage, reference) for reference in references)
        return
    with ThreadPoolExecutor(_READ_AHEAD) as pool:
        under_way: deque[tuple[int, Callable[[], bytes]]] = deque()
        for reference in references:
            size_bytes = reference.size_bytes
            while under_way and (
                len(under_way) == _READ_AHEAD or size_bytes + sum(size for size, _ in under_way) > _READ_AHEAD_BYTES
            ):
                yield under_way.popleft()[1]()
            read: Callable[[], bytes] = partial(read_text, storage, reference)
            try:
                read = pool.submit(read).result
            except RuntimeError:
                # At a limit of the system a text is read when its turn comes.
                pass
            under_way.append((size_bytes, read))
        while under_way:
            yield under_way.popleft()[1]()


def _check_own(manifest: Manifest, index: StoredIndex) -> None:
    """Check that the tensors of a rank's own items are whole in its index."""
    shared = frozenset(name for name, summary in manifest.items.items() if summary.kind != "per_rank")
    if any(tensor.item not in shared for tensor in index.boxes.frame.tensors):
        check_whole_of([index.boxes], shared, where=f"{manifest.generation}, rank {index.rank}")


def _reports(manifest: Manifest, index: Index) -> dict[str, ItemReport]:
    boxes: dict[str, list[Tensor]] = {name: [] for name in index.items}
    for tensor in index.tensors:
        boxes.setdefault(tensor.item, []).append(tensor)
    found = {}
    for name, listed in boxes.items():
        summary = manifest.items[name]
        if manifest.world_size == 1:
            if item_digest(index.items[name], listed) != summary.digest:
                raise contradiction(manifest, index.rank, f"item {name!r} has another digest in the manifest")
            found[name] = ItemReport(1)
            continue
        owner = index.rank if summary.kind == "per_rank" else None
        shares = rank_share(None, listed, tree_of=None, boxes_of=owner)
        if name not in index.items:
            found[name] = ItemReport(0, shares)
            continue
        tree = (index.items[name].plain,)
        own, common = (rank_share(tree, (), tree_of=one, boxes_of=None) for one in (index.rank, None))
        found[name] = ItemReport(1, shares, own, common)
    return found


def _digest_of(tree: Any) -> str:
    return digest_bytes(msgspec.json.encode(tree))
