"""A plain tree as text with places left open: values are put in without encoding the rest again.

Spec: F4.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from safepoint.errors import InternalError
from safepoint.format.plain import OpenPlace, Path, encode_plain

# Stands for an open place; within a text of JSON, this character is written as a backslash and digits.
_OPEN = b"\0"


class Stencil(msgspec.Struct, frozen=True):
    """Hold the text around the open places, and the path of each place for messages."""

    pieces: tuple[bytes, ...]
    paths: tuple[Path, ...]

    @classmethod
    def cut(cls, plain: object, *, path: str) -> Stencil:
        """Return the stencil of a plain tree with the leaves `Open` and `OpenScalar`, numbered in their order.

        Raises:
            RequestError: As `encode_plain` does.
        """
        places: list[OpenPlace] = []

        def leave_open(place: OpenPlace) -> msgspec.Raw:
            places.append(place)
            return msgspec.Raw(_OPEN)

        text = msgspec.json.Encoder(enc_hook=leave_open).encode(encode_plain(plain, path=path))
        if [place.number for place in places] != list(range(len(places))):
            raise InternalError("the open places of a tree are not in order", where=path)
        return cls(tuple(text.split(_OPEN)), tuple([place.path for place in places]))

    def fill(self, texts: Sequence[bytes]) -> bytes:
        """Return the text of the tree, given that of each open place."""
        whole = [b""] * (2 * len(self.pieces) - 1)
        whole[::2] = self.pieces
        whole[1::2] = texts
        return b"".join(whole)


def encode_text(plain: object, *, path: Path = "") -> bytes:
    """Return a plain value as text, without white space.

    Raises:
        RequestError: As `encode_plain` does.

    Spec: F4.
    """
    return msgspec.json.encode(encode_plain(plain, path=path))
