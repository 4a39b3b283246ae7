"""The digests of items, made again from the indexes of all ranks.

Spec: F7.3, F7.5.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from safepoint.format.index import Index, Tensor
from safepoint.format.manifest import Manifest
from safepoint.format.state_digest import item_digest, joint_digest, rank_share


def other_digests(manifest: Manifest, indexes: Sequence[Index]) -> Iterator[tuple[str, str]]:
    """Yield (item, digest as the indexes of all ranks give it) where the manifest states another.

    Spec: F7.3, F7.5.
    """
    boxes: dict[tuple[str, int], list[Tensor]] = {}
    for index in indexes:
        for tensor in index.tensors:
            boxes.setdefault((tensor.item, index.rank), []).append(tensor)
    for name, summary in manifest.items.items():
        if manifest.world_size == 1:
            found = item_digest(indexes[0].items[name], boxes.get((name, 0), ()))
        else:
            is_own = summary.kind == "per_rank"
            is_common = not is_own and sum(name in index.items for index in indexes) == 1
            shares = [
                rank_share(
                    (index.items[name].plain,) if name in index.items else None,
                    boxes.get((name, index.rank), ()),
                    tree_of=None if is_common else index.rank,
                    boxes_of=index.rank if is_own else None,
                )
                for index in indexes
            ]
            found = joint_digest(summary.type, shares)
        if found != summary.digest:
            yield name, found
