"""Seeded choices that are the same in every process and every version of Python."""

from __future__ import annotations

import hashlib


class Chance:
    """Draw numbers from a seed: a stream of its own, which touches no other random stream.

    Args:
        seeds: What the stream is a function of, such as a seed and a path; compared as text.
    """

    def __init__(self, *seeds: int | str) -> None:
        self._seed = "\0".join(str(seed) for seed in seeds)
        self._count = 0

    def below(self, limit: int) -> int:
        """Return a number from 0 up to, not including, `limit`, which may be of any size."""
        # 64 bits more than needed make the remainder as good as even.
        byte_count = limit.bit_length() // 8 + 9
        self._count += 1
        digest = hashlib.shake_256(f"{self._seed}\0{self._count}".encode()).digest(byte_count)
        return int.from_bytes(digest, "big") % limit

    def prefix(self, data: bytes) -> bytes:
        """Return a beginning of `data` that lacks at least its last byte."""
        return data[: self.below(len(data))] if data else data

    def flip_bit(self, data: bytes) -> bytes:
        """Return `data` with one bit turned over; empty data stays as it is."""
        if not data:
            return data
        flipped = bytearray(data)
        flipped[self.below(len(data))] ^= 1 << self.below(8)
        return bytes(flipped)
