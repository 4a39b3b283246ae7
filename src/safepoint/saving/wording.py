"""Wording: what a save says of the boxes of a data file, with places for the digests that are taken as it is written.

Spec: F3, F7.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, groupby
from operator import attrgetter

from safepoint.format.extent import BoxLike, ChunkLike
from safepoint.format.index import Index, IndexedItem
from safepoint.format.index_text import IndexText
from safepoint.format.state_digest import ItemText


class Wording:
    """Hold the texts of a file's boxes, for as long as it holds the same ones.

    Args:
        boxes: The boxes, in the order of the index.
        chunks: Those of each box.
    """

    __slots__ = ("_index", "_items")

    def __init__(self, boxes: Sequence[BoxLike], chunks: Sequence[Sequence[ChunkLike]]) -> None:
        counts = list(map(len, chunks))
        self._index = IndexText(boxes, chunks)
        ends = list(accumulate(counts))
        ordered = sorted(range(len(boxes)), key=list(map(attrgetter("item", "name"), boxes)).__getitem__)
        self._items: dict[str, tuple[ItemText, list[int]]] = {}
        for item, group in groupby(ordered, key=lambda number: boxes[number].item):
            numbers = list(group)
            text = ItemText([boxes[number] for number in numbers], [counts[number] for number in numbers])
            ranges = [range(ends[number] - counts[number], ends[number]) for number in numbers]
            self._items[item] = text, list(chain.from_iterable(ranges))

    def seal(self, index: Index, digests: Sequence[str]) -> bytearray:
        """Return the text of an index, itself without tensors, given the digests of all chunks in their order."""
        return self._index.seal(index, digests)

    def digest_of(self, name: str, item: IndexedItem, digests: Sequence[str]) -> str:
        """Return the digest of an item all of which one rank stores.

        Spec: F7.3.
        """
        text, places = self._items.get(name) or (ItemText([], []), [])
        return text.digest(item, [digests[place] for place in places])
