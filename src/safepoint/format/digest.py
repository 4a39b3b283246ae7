"""Digests: xxh3-128, written as 32 hexadecimal digits. They detect accidents, not attackers.

Spec: F2.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

HEX_LENGTH = 32


def digest_bytes(data: bytes | bytearray | memoryview) -> str:
    """Return the digest of bytes. Releases the interpreter lock for large buffers."""
    return xxhash.xxh3_128_hexdigest(data)


def running_digest() -> xxhash.xxh3_128:
    """Return a digest that is fed in pieces with `update` and read with `hexdigest`."""
    return xxhash.xxh3_128()


def digest_file(header: str, chunks: Iterable[str]) -> str:
    """Return a data file's digest from the digest of its header bytes and those of its chunks, in file order.

    Spec: F3.
    """
    return digest_of_parts(header, bytes.fromhex("".join(chunks)))


def digest_of_parts(header: str, chunks: bytes) -> str:
    """Return a data file's digest as `digest_file` does, from the chunks' digests one after another in binary form.

    Spec: F3.
    """
    return digest_bytes(bytes.fromhex(header) + chunks)


def is_digest(text: str) -> bool:
    """Return whether a text has the form of a digest."""
    # What is left when hexadecimal digits are taken off both ends begins with another letter.
    return len(text) == HEX_LENGTH and not text.strip("0123456789abcdef")
