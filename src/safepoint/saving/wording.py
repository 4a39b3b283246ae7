"""Wording: what a save says of the boxes of a data file, with places for the digests that are taken as it is written.

Spec: F3, F7.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, groupby
from operator import attrgetter
from typing import Any

from safepoint.format.extent import BoxLike, ChunkLike
from safepoint.format.index import Index, IndexedItem
from safepoint.format.index_text import IndexText
from safepoint.format.state_digest import ItemText, ShareText


class Wording:
    """Hold the texts of a file's boxes, for as long as it holds the same ones.

    Args:
        boxes: The boxes, in the order of the index.
        chunks: Those of each box.
        is_alone: Whether there is one rank, whose items have digests in place of shares of them.
    """

    __slots__ = ("_index", "_items", "_shares")

    def __init__(self, boxes: Sequence[BoxLike], chunks: Sequence[Sequence[ChunkLike]], *, is_alone: bool) -> None:
        counts = list(map(len, chunks))
        self._index = IndexText(boxes, chunks)
        ends = list(accumulate(counts))
        ordered = sorted(range(len(boxes)), key=list(map(attrgetter("item", "name"), boxes)).__getitem__)
        self._items: dict[str, tuple[ItemText, list[int]]] = {}
        self._shares: dict[str, tuple[ShareText, list[int]]] = {}
        for item, group in groupby(ordered, key=lambda number: boxes[number].item):
            numbers = list(group)
            own, own_counts = [boxes[number] for number in numbers], [counts[number] for number in numbers]
            places = list(chain.from_iterable(range(ends[number] - counts[number], ends[number]) for number in numbers))
            if is_alone:
                self._items[item] = ItemText(own, own_counts), places
            else:
                self._shares[item] = ShareText(own, own_counts), places

    @property
    def shared(self) -> Iterable[str]:
        """Return the items of which one of several ranks stores boxes."""
        return self._shares

    def seal(self, index: Index, digests: Sequence[str]) -> bytearray:
        """Return the text of an index, itself without tensors, given the digests of all chunks in their order."""
        return self._index.seal(index, map(str.encode, digests))

    def digest_of(self, name: str, item: IndexedItem, digests: Sequence[str]) -> str:
        """Return the digest of an item all of which one rank stores.

        Spec: F7.3.
        """
        text, places = self._items.get(name) or (ItemText([], []), [])
        return text.digest(item, map(str.encode, map(digests.__getitem__, places)))

    def share_of(
        self, name: str, tree: tuple[Any] | None, digests: Sequence[str], *, tree_of: int | None, boxes_of: int | None
    ) -> str:
        """Return what a rank adds to the digest of an item; the arguments are those of `rank_share`.

        Spec: F7.5.
        """
        text, places = self._shares.get(name) or (ShareText([], []), [])
        return text.share(tree, [digests[place] for place in places], tree_of=tree_of, boxes_of=boxes_of)
