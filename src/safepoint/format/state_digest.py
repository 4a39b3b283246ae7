"""The digest of an item's state, independent of where its bytes lie.

With one rank it is taken over the whole state in order. With several, nobody has the whole: each rank adds up the
digests of what it stored, and the leader adds up the ranks.

Spec: F7.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from operator import attrgetter
from typing import Any

import msgspec

from safepoint.format.digest import HEX_LENGTH, digest_bytes
from safepoint.format.encoding import PLACE, TextWithPlaces, encode_each
from safepoint.format.extent import BoxLike, Shape
from safepoint.format.index import IndexedItem, Tensor

_BOX = attrgetter("dtype", "global_shape", "offset", "shape")
_DIGEST: Callable[[Any], str] = attrgetter("digest")
_MODULUS = 1 << (4 * HEX_LENGTH)


def item_digest(item: IndexedItem, tensors: Iterable[Tensor]) -> str:
    """Return the digest of an item's type, its plain tree and its tensors by name, as one rank stores them.

    Spec: F7.3.
    """
    ordered = sorted(tensors, key=attrgetter("name"))
    lines = [[one.name, one.dtype, one.shape, list(map(_DIGEST, one.chunks))] for one in ordered]
    parts = [item.type.encode("utf-8"), msgspec.json.encode(item.plain), msgspec.json.Encoder().encode_lines(lines)]
    # Every line ends here as it does before another part, and the last one does not.
    return digest_bytes(memoryview(b"\n".join(parts))[:-1])


class ItemText:
    """Hold the text that the digest of an item is taken over, as far as it tells of tensors, with places for digests.

    It is the same from save to save while the same boxes are stored.

    Args:
        boxes: The item's boxes by name.
        counts: How many chunks each of them has.
    """

    __slots__ = ("_text",)

    def __init__(self, boxes: Sequence[BoxLike], counts: Sequence[int]) -> None:
        described = functools.cache(_described)
        names = encode_each([box.name for box in boxes])
        lines = [
            f"[{name},{described(box.dtype, box.shape, count)}"
            for name, box, count in zip(names, boxes, counts, strict=True)
        ]
        self._text = TextWithPlaces("\n".join(lines)) if lines else None

    def digest(self, item: IndexedItem, digests: Iterable[bytes]) -> str:
        """Return the digest of the item with these tensors.

        Args:
            item: Its type and its plain tree.
            digests: Those of all chunks, in the order of the tensors.

        Spec: F7.3.
        """
        parts = [item.type.encode("utf-8"), b"\n", msgspec.json.encode(item.plain)]
        if self._text is not None:
            parts += (b"\n", *self._text.fill(digests))
        return digest_bytes(b"".join(parts))


class ShareText:
    """Hold the texts that a rank's share of an item's digest is taken over, as far as they tell of its boxes.

    They are the same from save to save while the same boxes are stored.

    Args:
        boxes: The item's boxes that this rank stores.
        counts: How many chunks each of them has.
    """

    __slots__ = ("_counts", "_texts")

    def __init__(self, boxes: Sequence[BoxLike], counts: Sequence[int]) -> None:
        described = functools.cache(_described_box)
        names = encode_each([box.name for box in boxes])
        self._texts = [f",{name},{described(*_BOX(box))}," for name, box in zip(names, boxes, strict=True)]
        self._counts = counts

    def share(
        self, tree: tuple[Any] | None, digests: Iterable[str], *, tree_of: int | None, boxes_of: int | None
    ) -> str:
        """Return what `rank_share` returns of these boxes, given the digests of all chunks in their order.

        Spec: F7.5.
        """
        left, opened = iter(digests), "[null" if boxes_of is None else f"[{boxes_of}"
        lists = ['","'.join(islice(left, count)) for count in self._counts]
        lines = [
            f'{opened}{text}["{listed}"]]' if listed else f"{opened}{text}[]]"
            for text, listed in zip(self._texts, lists, strict=True)
        ]
        encoded = [] if tree is None else [msgspec.json.encode([tree_of, tree[0]])]
        return add_digests(map(digest_bytes, chain(encoded, map(str.encode, lines))))


def joint_digest(type_name: str, shares: Iterable[str]) -> str:
    """Return the digest of an item that several ranks stored, from its type and the shares of all ranks, in any order.

    Spec: F7.5.
    """
    return digest_bytes(f"{type_name}\n{add_digests(shares)}".encode())


def rank_share(tree: tuple[Any] | None, boxes: Iterable[Tensor], *, tree_of: int | None, boxes_of: int | None) -> str:
    """Return what one rank adds to the joint digest of an item.

    Args:
        tree: The plain tree in JSON form, if this rank stores it, else None.
        boxes: The boxes of the item that this rank stores.
        tree_of: This rank, where each of several ranks stores its own tree; else None.
        boxes_of: This rank, where the item is of the kind ``per_rank``; else None.

    Spec: F7.5.
    """
    lines = [] if tree is None else [msgspec.json.encode([tree_of, tree[0]])]
    for box in boxes:
        chunks = [chunk.digest for chunk in box.chunks]
        line = [boxes_of, box.name, box.dtype, box.global_shape, box.offset, box.shape, chunks]
        lines.append(msgspec.json.encode(line))
    return add_digests(digest_bytes(line) for line in lines)


def add_digests(digests: Iterable[str]) -> str:
    """Return the sum of digests as numbers, modulo 2^128: the same in whatever order they come; zeros for none."""
    total = sum(int(digest, 16) for digest in digests) % _MODULUS
    return f"{total:0{HEX_LENGTH}x}"


def _described_box(dtype: str, global_shape: Shape, offset: Shape, shape: Shape) -> str:
    """Return the text of a box of a rank between its name and its chunks."""
    return msgspec.json.encode([dtype, global_shape, offset, shape])[1:-1].decode("utf-8")


def _described(dtype: str, shape: Shape, count: int) -> str:
    """Return the text of a box behind its name, with places for the digests of so many chunks."""
    head = msgspec.json.encode([dtype, shape])[1:-1].decode("utf-8")
    places = ",".join([f'"{PLACE}"'] * count)
    return f"{head},[{places}]]"
