"""Seal any bytes as the specification says, without the code under test."""

from __future__ import annotations

import json
from typing import Any

import xxhash


def sealed(tail: bytes) -> bytes:
    """Return a record whose digest is right, whatever follows it."""
    return b'{"digest":"' + xxhash.xxh3_128_hexdigest(tail).encode() + tail


def sealed_tree(tree: dict[str, Any]) -> bytes:
    """Return a record that holds a JSON object."""
    return sealed(b'",' + json.dumps(tree, ensure_ascii=False).encode("utf-8")[1:] + b"\n")


def tree_of(record: bytes) -> dict[str, Any]:
    """Return the fields of a record but its digest."""
    tree: dict[str, Any] = json.loads(record)
    del tree["digest"]
    return tree
