"""The text of an index with a place for each digest.

What an index says of tensors is the same from save to save while the same boxes are stored, but for the digests. The
text around them is made once, and is to the byte what `seal` makes of the whole record.

Spec: F2, F3.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from safepoint.format.encoding import encode_sealed, seal_text
from safepoint.format.index import Index, Tensor

# A quotation mark within a string is written with a backslash, so no name can look like the first of these.
_ABSENT, _PLACE = '"digest": ""', '"digest": "%s"'
_NO_TENSORS = b'"tensors": []\n}'


class _Boxes(msgspec.Struct):
    tensors: Sequence[Tensor]


class IndexText:
    """Hold the text of an index's boxes, whose chunks state an empty text as their digest."""

    __slots__ = ("_template",)

    def __init__(self, boxes: Sequence[Tensor]) -> None:
        text = encode_sealed(_Boxes(boxes)).decode("utf-8").replace("%", "%%")
        # Without the brace in front and its line.
        self._template = text[2:].lstrip().replace(_ABSENT, _PLACE)

    def seal(self, index: Index, digests: Sequence[str]) -> bytes:
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
        return seal_text(head[: -len(_NO_TENSORS)] + (self._template % tuple(digests)).encode("utf-8"))
