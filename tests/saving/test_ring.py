"""The ring's pieces are memory that the disk takes in few requests."""

from __future__ import annotations

from safepoint.saving.ring import SMALLEST_BYTES, Ring
from tests.storage.mappings import address_of, flags_at

PIECE = 8 << 20


def test_pieces_lie_one_after_the_other_in_huge_pages() -> None:
    ring = Ring()
    first = address_of(ring.piece(0, 5))
    assert SMALLEST_BYTES == 4 * PIECE
    ranges = [(0, 4096), (4096, PIECE), (PIECE, 2 * PIECE), (3 * PIECE, 4 * PIECE), (4 * PIECE, 4 * PIECE + 7)]
    pieces = [ring.piece(begin, end) for begin, end in ranges]
    assert [address_of(piece) - first for piece in pieces] == [0, 4096, PIECE, 3 * PIECE, 0]
    assert [len(piece) for piece in pieces] == [4096, PIECE - 4096, PIECE, PIECE, 7]
    assert {"hg", "wf"} <= flags_at(first)
