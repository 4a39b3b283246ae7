"""A plain tree as text with places left open: values are put in without encoding the rest again.

Spec: F4.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from safepoint.errors import InternalError
from safepoint.format.plain import encode_plain

# Within a string of JSON no quotation mark stands without a backslash, so none can look like this.
_OPEN = re.compile(rb'\{"\$open":\[(\d+),("(?:[^"\\]|\\.)*")\]\}')


class Stencil(msgspec.Struct, frozen=True):
    """Hold the text around the open places, and the path of each place for messages."""

    pieces: tuple[bytes, ...]
    paths: tuple[str, ...]

    @classmethod
    def cut(cls, plain: object, *, path: str) -> Stencil:
        """Return the stencil of a plain tree with the leaves `Open` and `OpenScalar`, numbered in their order.

        Raises:
            RequestError: As `encode_plain` does.
        """
        parts = _OPEN.split(encode_text(plain, path=path))
        pieces, numbers, paths = parts[::3], parts[1::3], parts[2::3]
        if [int(number) for number in numbers] != list(range(len(numbers))):
            raise InternalError("the open places of a tree are not in order", where=path)
        return cls(tuple(pieces), tuple(msgspec.json.decode(one, type=str) for one in paths))

    def fill(self, texts: Sequence[bytes]) -> bytes:
        """Return the text of the tree, given that of each open place."""
        whole = [b""] * (2 * len(self.pieces) - 1)
        whole[::2] = self.pieces
        whole[1::2] = texts
        return b"".join(whole)


def encode_text(plain: object, *, path: str = "") -> bytes:
    """Return a plain value as text, without white space.

    Raises:
        RequestError: As `encode_plain` does.

    Spec: F4.
    """
    return msgspec.json.encode(encode_plain(plain, path=path))
