"""Whole: the leader's proof that the indexes of all ranks make the checkpoint that its manifest names.

It is made from the boxes of all ranks in columns, and from sums of digests; the leader sees no chunk.

Spec: C5.1, F7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from safepoint.errors import CorruptionError
from safepoint.format.columns import Columns, ColumnsReader, HeldTensor
from safepoint.format.manifest import Manifest
from safepoint.format.state_digest import joint_digest
from safepoint.restoring.examine import ItemReport, Report, Share, check_whole_of
from safepoint.restoring.validate import check_objects, contradiction, owned_items, references_of
from safepoint.state.item import TensorSpec


@dataclass(frozen=True, slots=True)
class Whole:
    """Hold what the leader knows of all indexes.

    `boxes` are those of each rank that saved. `specs` are, by item and name, the tensors that are not each rank's own.
    `trees` names the ranks whose plain trees of an item are different ones, in order; `tree_counts` says how many ranks
    stored one.
    """

    boxes: tuple[Columns, ...]
    specs: Mapping[str, Mapping[str, TensorSpec]]
    trees: Mapping[str, tuple[int, ...]]
    tree_counts: Mapping[str, int]


def whole_of(manifest: Manifest, share: Share, reports: Sequence[Report]) -> Whole:
    """Return what all indexes say together, having proven that it is what the manifest says.

    Args:
        manifest: The manifest, with all its objects.
        share: What the leader itself has read.
        reports: What the ranks tell, in their order; the leader's boxes are in its share.

    Raises:
        CorruptionError: Indexes contradict the manifest or each other; a tensor is not whole.

    Spec: C5.1, F7.3, F7.4, F7.5.
    """
    references = references_of(manifest)
    for named in dict.fromkeys(report.objects for report in reports):
        check_objects(manifest, references, named)
    per_rank = owned_items(manifest)
    items = _items(manifest, reports)
    boxes = _boxes(manifest, share, reports)
    specs = _specs(manifest, boxes, per_rank)
    check_whole_of(boxes, per_rank, where=manifest.generation)
    trees: dict[str, dict[str, int]] = {}
    for report in reports:
        for name, listed in report.trees.items():
            for rank, digest in listed:
                trees.setdefault(name, {}).setdefault(digest, rank)
    firsts = {name: tuple(sorted(by_digest.values())) for name, by_digest in trees.items()}
    return Whole(boxes, specs, firsts, {name: item.trees for name, item in items.items()})


def _items(manifest: Manifest, reports: Sequence[Report]) -> dict[str, ItemReport]:
    """Return what all indexes say of each item, which is what the manifest says of it."""
    items: dict[str, ItemReport] = {}
    for report in reports:
        for name, found in report.items.items():
            items[name] = items[name].joined(found) if name in items else found
    if {name for name, item in items.items() if item.trees} != manifest.items.keys():
        raise contradiction(manifest, 0, "the manifest names other items")
    for name, item in items.items():
        summary = manifest.items[name]
        is_common = summary.kind != "per_rank" and item.trees == 1
        digest = joint_digest(summary.type, (item.boxes, item.common if is_common else item.own))
        # That of one process, the rank that has read its index has compared.
        if manifest.world_size > 1 and digest != summary.digest:
            raise contradiction(manifest, 0, f"item {name!r} has another digest in the manifest")
    return items


def _boxes(manifest: Manifest, share: Share, reports: Sequence[Report]) -> tuple[Columns, ...]:
    reader = ColumnsReader()
    found = {index.rank: index.boxes for index in share.indexes}
    for report in reports:
        for told in report.boxes:
            found[told.rank] = reader.decode(told.columns, digest=told.digest, where=f"rank {told.rank}")
    if found.keys() != set(range(manifest.world_size)):
        expected = f"{manifest.world_size} indexes"
        raise CorruptionError(
            "not every rank has an index", where=manifest.generation, expected=expected, found=len(found)
        )
    # Indexes that list equal boxes are not one: what both list overlaps.
    return tuple(Columns(one.frame, one.table, f"index {rank}") for rank, one in sorted(found.items()))


def _specs(manifest: Manifest, boxes: Sequence[Columns], per_rank: frozenset[str]) -> dict[str, dict[str, TensorSpec]]:
    """Return the tensors that are not each rank's own, whole, in the order in which they come."""
    found: dict[str, dict[str, TensorSpec]] = {}
    firsts: dict[tuple[str, str], HeldTensor] = {}
    for frame in {one.frame.digest: one.frame for one in boxes}.values():
        for tensor in frame.tensors:
            if tensor.item in per_rank:
                continue
            key = (tensor.item, tensor.name)
            first = firsts.setdefault(key, tensor)
            if first is tensor:
                shape = tensor.global_shape
                spec = TensorSpec(tensor.name, tensor.dtype, shape, shape, (0,) * len(shape))
                found.setdefault(tensor.item, {})[tensor.name] = spec
            elif (first.dtype, first.global_shape) != (tensor.dtype, tensor.global_shape):
                raise CorruptionError(
                    "the boxes of a tensor contradict each other",
                    where=f"{manifest.generation}: {tensor.item}/{tensor.name}",
                    expected=f"{first.dtype} {list(first.global_shape)}",
                    found=f"{tensor.dtype} {list(tensor.global_shape)}",
                )
    return found
