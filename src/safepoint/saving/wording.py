"""Wording: what a save says of the boxes of a data file, with places for the digests that are taken as it is written.

Spec: F3, F7.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from safepoint.format.index import Index, IndexedItem, Tensor
from safepoint.format.index_text import IndexText
from safepoint.format.state_digest import ItemText


class Wording:
    """Hold the texts of a file's boxes, for as long as it holds the same ones.

    Args:
        tensors: What the index says of the boxes, in its order; the chunks state an empty text as their digest.
    """

    __slots__ = ("_index", "_items")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._index = IndexText(tensors)
        ends = list(accumulate(len(tensor.chunks) for tensor in tensors))
        own: dict[str, list[tuple[str, int]]] = {}
        for number, tensor in enumerate(tensors):
            own.setdefault(tensor.item, []).append((tensor.name, number))
        self._items: dict[str, tuple[ItemText, list[int]]] = {}
        for item, named in own.items():
            numbers = [number for _, number in sorted(named)]
            places = [
                place for number in numbers for place in range(ends[number] - len(tensors[number].chunks), ends[number])
            ]
            self._items[item] = ItemText(tensors[number] for number in numbers), places

    def seal(self, index: Index, digests: Sequence[str]) -> bytes:
        """Return the text of an index, itself without tensors, given the digests of all chunks in their order."""
        return self._index.seal(index, digests)

    def digest_of(self, name: str, item: IndexedItem, digests: Sequence[str]) -> str:
        """Return the digest of an item all of which one rank stores.

        Spec: F7.3.
        """
        text, places = self._items.get(name) or (ItemText([]), [])
        return text.digest(item, [digests[place] for place in places])
