"""The header of a data file, as any reader of safetensors files sees it, against the index that is normative.

Spec: F3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from safepoint.errors import CorruptionError
from safepoint.format.dtypes import DTYPES
from safepoint.format.encoding import parse_json
from safepoint.format.index import Index, Tensor, entry_keys

_LENGTH_BYTES = 8
_METADATA = "__metadata__"


def check_header(header: bytes, index: Index, number: int, *, where: str) -> None:
    """Check that a data file's header names the tensors, types, shapes and places that the index names.

    A tensor of which a chunk lies in another file is not compared.

    Args:
        header: The bytes from the file's begin to its first tensor.
        index: The index that describes the file.
        number: The file's number among the index's objects.
        where: The file's name, for messages.

    Raises:
        CorruptionError: The header is no strict JSON, or contradicts the index; names the tensor.

    Spec: F3.
    """
    stated = int.from_bytes(header[:_LENGTH_BYTES], "little")
    if stated != len(header) - _LENGTH_BYTES:
        raise CorruptionError(
            "a header states another length", where=where, expected=len(header) - _LENGTH_BYTES, found=stated
        )
    entries = parse_json(header[_LENGTH_BYTES:], where=where)
    if not isinstance(entries, dict):
        raise CorruptionError("a header is no JSON object", where=where, found=type(entries).__name__)
    _check_metadata(entries.pop(_METADATA, {}), where)
    keys = entry_keys((tensor.item, tensor.name, tensor.offset) for tensor in index.tensors)
    pairs = list(zip(keys, index.tensors, strict=True))
    places = {key: {chunk.object for chunk in tensor.chunks} for key, tensor in pairs}
    for key, tensor in pairs:
        if places[key] <= {number}:
            _check_entry(entries.get(key), tensor, len(header), where=f"{where}: {key}")
    strange = sorted(entries.keys() - {key for key, objects in places.items() if number in objects or not objects})
    if strange:
        raise CorruptionError("a header lists a tensor that the index does not", where=f"{where}: {strange[0][:200]}")


def _check_metadata(metadata: Any, where: str) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CorruptionError("a header's metadata are no texts", where=where)


def _check_entry(entry: Any, tensor: Tensor, header_bytes: int, *, where: str) -> None:
    if entry is None:
        raise CorruptionError("a header does not list a tensor of the index", where=where)
    expected = _expected_entry(tensor, header_bytes)
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CorruptionError(
            "a header's entry has other fields", where=where, expected=expected, found=str(entry)[:200]
        )
    if not tensor.chunks:
        # Without a byte it has no place of its own; any one will do.
        begin_and_end = entry["data_offsets"]
        is_empty = isinstance(begin_and_end, list) and len(begin_and_end) == 2 and begin_and_end[0] == begin_and_end[1]
        expected = {**expected, "data_offsets": begin_and_end if is_empty else "two equal offsets"}
    if entry != expected or any(type(number) is not int for number in (*entry["shape"], *entry["data_offsets"])):
        raise CorruptionError("a header contradicts the index", where=where, expected=expected, found=str(entry)[:200])


def _expected_entry(tensor: Tensor, header_bytes: int) -> Mapping[str, Any]:
    dtype = DTYPES[tensor.dtype]
    shape = list(tensor.shape)
    if dtype.safetensors is None:
        shape.append(dtype.size_bytes)
    begin = tensor.chunks[0].offset_bytes - header_bytes if tensor.chunks else 0
    end = begin + sum(chunk.size_bytes for chunk in tensor.chunks)
    return {"dtype": dtype.safetensors or "U8", "shape": shape, "data_offsets": [begin, end]}
