"""The ring's pieces are memory that the disk takes in few requests."""

from __future__ import annotations

from safepoint.saving.ring import SMALLEST_BYTES, Ring
from tests.storage.mappings import address_of, flags_at

PIECE = 8 << 20


def test_pieces_lie_one_after_the_other_in_huge_pages() -> None:
    ring = Ring()
    first = address_of(ring.piece(0, PIECE))
    assert SMALLEST_BYTES == 4 * PIECE
    assert [address_of(ring.piece(turn, PIECE)) - first for turn in range(5)] == [0, PIECE, 2 * PIECE, 3 * PIECE, 0]
    assert {"hg", "wf"} <= flags_at(first)
