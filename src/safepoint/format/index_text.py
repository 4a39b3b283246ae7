"""The text of an index with a place for each digest.

What an index says of tensors is the same from save to save while the same boxes are stored, but for the digests. The
text around them is made once, and is to the byte what `seal` makes of the whole record.

Spec: F2, F3.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from operator import attrgetter

import msgspec

from safepoint.format.encoding import PLACE, TextWithPlaces, encode_each, encode_sealed, seal_text
from safepoint.format.extent import BoxLike, ChunkLike, Shape
from safepoint.format.index import Chunk, Index, Tensor

# Where the texts of two boxes of a kind differ; like `PLACE`, no text of JSON holds this character.
_OWN = "\1"
# A quotation mark within a string is written with a backslash, so no name can look like one of these.
_OPENED = (
    ('"name": ""', f'"name": {_OWN}'),
    ('"offset_bytes": 0', f'"offset_bytes": {_OWN}'),
    ('"digest": ""', f'"digest": "{PLACE}"'),
)
_Kind = tuple[str, str, Shape, Shape, Shape]
_KIND = attrgetter("item", "dtype", "global_shape", "offset", "shape")
_SIZE = attrgetter("rows", "size_bytes")
# What stands before and behind the boxes.
_HEAD_LINES, _TAIL_LINES = 2, 2
_NO_TENSORS = b'"tensors": []\n}'


class _Boxes(msgspec.Struct):
    tensors: tuple[Tensor, ...]


class IndexText:
    """Hold the text of an index's boxes, with places for the digests of their chunks.

    Args:
        boxes: The boxes, in the order of the index.
        chunks: Those of each box; all lie in the first object that the index lists.
    """

    __slots__ = ("_text",)

    def __init__(self, boxes: Sequence[BoxLike], chunks: Sequence[Sequence[ChunkLike]]) -> None:
        # Boxes that differ in their names and places alone have texts that do.
        described = functools.cache(_described)
        parts: list[str] = []
        for name, box, own in zip(encode_each([box.name for box in boxes]), boxes, chunks, strict=True):
            head, *middle, tail = described(_KIND(box), tuple(map(_SIZE, own)))
            parts += (",\n" if parts else "", head, name)
            for text, chunk in zip(middle, own, strict=True):
                parts += (text, str(chunk.offset_bytes))
            parts.append(tail)
        whole = ['"tensors": [\n', *parts, "\n ]\n}"] if parts else [_NO_TENSORS.decode("ascii")]
        self._text = TextWithPlaces("".join(whole))

    def seal(self, index: Index, digests: Iterable[bytes]) -> bytearray:
        """Return the text of an index of these boxes.

        Args:
            index: The rest of it, without tensors.
            digests: Those of all chunks, in the order of the boxes.

        Raises:
            RequestError: A text in the record is not Unicode.

        Spec: F2.
        """
        head = encode_sealed(index)
        assert head.endswith(_NO_TENSORS)
        return seal_text([head[: -len(_NO_TENSORS)], *self._text.fill(digests)])


def _described(kind: _Kind, sizes: tuple[tuple[tuple[int, int], int], ...]) -> list[str]:
    """Return the text of a box around its name and the places of its chunks."""
    item, dtype, global_shape, offset, shape = kind
    unplaced = tuple(Chunk(rows, 0, 0, size_bytes, "") for rows, size_bytes in sizes)
    whole = _Boxes((Tensor(item, "", dtype, global_shape, offset, shape, unplaced),))
    lines = encode_sealed(whole).decode("utf-8").split("\n")
    text = "\n".join(lines[_HEAD_LINES:-_TAIL_LINES])
    for empty, open_text in _OPENED:
        text = text.replace(empty, open_text)
    return text.split(_OWN)
