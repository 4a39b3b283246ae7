"""Sparse tensors as their parts: dense index and value tensors, and the few facts that rebuild the whole exactly.

The parts are what torch holds, not a canonical form: an uncoalesced tensor keeps its repeated entries, its order and
the fact that it is not coalesced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from safepoint.errors import CorruptionError, RequestError
from safepoint.state.item import TensorSpec

_COMPRESSED = {
    torch.sparse_csr: "sparse_csr",
    torch.sparse_csc: "sparse_csc",
    torch.sparse_bsr: "sparse_bsr",
    torch.sparse_bsc: "sparse_bsc",
}
_LAYOUTS = {name: layout for layout, name in _COMPRESSED.items()}


@dataclass(frozen=True, slots=True)
class SparseParts:
    """Hold a sparse tensor apart; `tensors` are the live parts by name, in a fixed order."""

    layout: str
    size: tuple[int, ...]
    is_coalesced: bool
    tensors: Mapping[str, torch.Tensor]


def is_sparse(tensor: torch.Tensor) -> bool:
    """Return whether the tensor has one of the five sparse layouts."""
    return tensor.layout == torch.sparse_coo or tensor.layout in _COMPRESSED


def take_apart(tensor: torch.Tensor, *, path: str) -> SparseParts:
    """Return the parts of a sparse tensor, detached and sharing its memory.

    Raises:
        RequestError: The indices are not as torch demands; by default it does not look at them when a tensor is made,
            and a restore, which does, could not put them together again.
    """
    whole = tensor.detach()
    size = tuple(whole.shape)
    if whole.layout == torch.sparse_coo:
        coordinates = {"indices": whole._indices(), "values": whole._values()}
        parts = SparseParts("sparse_coo", size, whole.is_coalesced(), coordinates)
    elif whole.layout in (torch.sparse_csr, torch.sparse_bsr):
        rows = {"compressed": whole.crow_indices(), "plain": whole.col_indices(), "values": whole.values()}
        parts = SparseParts(_COMPRESSED[whole.layout], size, False, rows)
    else:
        columns = {"compressed": whole.ccol_indices(), "plain": whole.row_indices(), "values": whole.values()}
        parts = SparseParts(_COMPRESSED[whole.layout], size, False, columns)
    try:
        put_together(parts, where=path)
    except CorruptionError as exc:
        raise RequestError(
            "a sparse tensor has indices that torch refuses, so it could not be restored",
            where=path,
            expected="indices that torch.sparse.check_sparse_tensor_invariants accepts",
            found=exc.found,
            remedy="Make it with check_invariants=True: sorted, inside, and coalesced if it says so.",
        ) from exc
    return parts


def put_together(parts: SparseParts, *, where: str) -> torch.Tensor:
    """Return the sparse tensor that these parts make; torch checks that the indices lie inside.

    Raises:
        CorruptionError: The parts contradict each other.
    """
    try:
        if parts.layout == "sparse_coo":
            indices, values = parts.tensors["indices"], parts.tensors["values"]
            return torch.sparse_coo_tensor(
                indices, values, parts.size, is_coalesced=parts.is_coalesced, check_invariants=True
            )
        return torch.sparse_compressed_tensor(
            parts.tensors["compressed"],
            parts.tensors["plain"],
            parts.tensors["values"],
            parts.size,
            layout=_LAYOUTS[parts.layout],
            check_invariants=True,
        )
    except (RuntimeError, KeyError) as exc:
        raise _unfit(parts.layout, str(exc), where=where) from exc


def check_parts(layout: str, size: tuple[int, ...], specs: Mapping[str, TensorSpec]) -> None:
    """Check what the shapes of stored parts tell before their bytes are read.

    Raises:
        CorruptionError: The parts cannot make a tensor of this layout and size.
    """
    if layout == "sparse_coo":
        names = ["indices", "values"]
    elif layout in _LAYOUTS:
        names = ["compressed", "plain", "values"]
    else:
        raise _unfit("a sparse layout", repr(layout))
    shapes = {name: spec.global_shape for name, spec in specs.items()}
    if list(shapes) != names:
        raise _unfit(f"the parts {', '.join(names)}", ", ".join(shapes))
    if any(specs[name].dtype not in ("int64", "int32") for name in names[:-1]):
        raise _unfit("indices of whole numbers", str({name: spec.dtype for name, spec in specs.items()}))
    if layout == "sparse_coo":
        entries = shapes["indices"][1:]
        inner = tuple(size[shapes["indices"][0] :])
        if len(shapes["indices"]) != 2 or shapes["indices"][0] > len(size) or shapes["values"] != (*entries, *inner):
            raise _unfit(f"values of shape {(*entries, *inner)}", str(shapes["values"]))
    elif len(size) < 2:
        raise _unfit("two dimensions or more", str(size))


def replace(live: torch.Tensor, restored: torch.Tensor) -> None:
    """Give a live sparse tensor the contents of another one of its layout, shape and dtype; it keeps its identity."""
    if live.layout == torch.sparse_coo:
        # Assigning through `data` alone keeps an uncoalesced source uncoalesced; copy_ does not.
        live.data = restored
        return
    with torch.no_grad():
        # `data =` on a compressed tensor leaves the old values behind without an error.
        live.resize_as_sparse_(restored)
        live.copy_(restored)


def _unfit(expected: str, found: str, *, where: str = "a sparse tensor") -> CorruptionError:
    return CorruptionError(
        "the parts of a sparse tensor do not fit together", where=where, expected=expected, found=found
    )
