"""The digest of an item's state, independent of where its bytes lie.

Spec: F7.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from safepoint.format.digest import digest_bytes
from safepoint.format.index import IndexedItem, Tensor


def item_digest(item: IndexedItem, tensors: Iterable[Tensor]) -> str:
    """Return the digest of an item's type, its plain tree and its tensors by name, wherever they lie.

    Spec: F7.
    """
    parts = [item.type.encode("utf-8"), msgspec.json.encode(item.plain)]
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        chunks = [chunk.digest for chunk in tensor.chunks]
        parts.append(msgspec.json.encode([tensor.name, tensor.dtype, tensor.shape, chunks]))
    return digest_bytes(b"\n".join(parts))
