"""Form: what a rank's data file looks like, known before any byte of it is read.

The form follows from which boxes the file holds, and so it is the same from save to save; only digests differ.

Spec: F3.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from safepoint.format.digest import digest_bytes
from safepoint.format.dtypes import DTYPES
from safepoint.format.extent import Shape, split_rows
from safepoint.format.index import Chunk, Tensor, entry_keys
from safepoint.saving.layout import LayoutBox, cut_digest
from safepoint.saving.wording import Wording

ALIGNMENT_BYTES = 4096


class ChunkForm(msgspec.Struct, frozen=True):
    """Say which rows of its box a chunk holds, and where it lies in the file."""

    rows: tuple[int, int]
    offset_bytes: int
    size_bytes: int


class Entry(msgspec.Struct, frozen=True):
    """Say where a box lies in the file; `number` is its place among the boxes that the form was made of."""

    number: int
    box: LayoutBox
    offset_bytes: int
    size_bytes: int
    chunks: tuple[ChunkForm, ...]


@dataclass(frozen=True, slots=True)
class FileForm:
    """Hold the header of a data file, and its entries in their order; there are no holes.

    `extents` are the sizes of all that has a digest of its own, in the order of the file: the header, then each chunk.
    `layout` is the digest of the boxes that is voted with. `wording` is what one rank
    says of the boxes that it alone has written; absent where that is not so.
    """

    header: bytes
    entries: tuple[Entry, ...]
    extents: tuple[int, ...]
    size_bytes: int
    layout: str
    wording: Wording | None = None


class Forms:
    """Keep the form of the last save: the next one's is most often the same."""

    def __init__(self) -> None:
        self._key = ""
        self._form: FileForm | None = None

    def of(self, division: str, boxes: Callable[[], Sequence[LayoutBox]], *, is_alone: bool) -> FileForm:
        """Return the form of a rank's file.

        Args:
            division: The digest of how the state is divided; a rank writes the same boxes wherever it is the same.
            boxes: Returns these boxes.
            is_alone: Whether there is one rank.
        """
        if self._form is None or division != self._key:
            self._key, self._form = division, form_of(boxes(), is_alone=is_alone)
        return self._form


def form_of(boxes: Sequence[LayoutBox], *, is_alone: bool) -> FileForm:
    """Return the form of the file that holds these boxes: by falling item size, then name.

    Spec: F3.
    """
    ordered = sorted(enumerate(boxes), key=lambda pair: _order(pair[1]))
    in_file = [box for _, box in ordered]
    header = encode_header(in_file)
    entries, end = [], len(header)
    for number, box in ordered:
        size_bytes = box.size_bytes
        entries.append(Entry(number, box, end, size_bytes, _chunks(box, end)))
        end += size_bytes
    layout = _digest_in_order(in_file) if is_alone else cut_digest(boxes)
    sizes = (chunk.size_bytes for entry in entries for chunk in entry.chunks)
    wording = Wording([_unsigned(entry) for entry in entries]) if is_alone else None
    return FileForm(header, tuple(entries), (len(header), *sizes), end, layout, wording)


def encode_header(boxes: Sequence[LayoutBox], *, rows: Sequence[int] | None = None) -> bytes:
    """Return the safetensors header of a file of boxes in this order, padded so that data begins on a 4,096-byte line.

    Args:
        boxes: The boxes.
        rows: How many rows of each the file holds; all, if absent. A box of which it holds none has no entry.

    Spec: F3.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    keys = entry_keys((box.item, box.name, box.offset) for box in boxes)
    start = 0
    counts = rows or [box.row_count for box in boxes]
    for key, box, count in zip(keys, boxes, counts, strict=True):
        row_bytes, has_bytes = box.row_bytes, box.size_bytes > 0
        if has_bytes and not count:
            continue
        dtype = DTYPES[box.dtype]
        shape = [count, *box.shape[1:]] if has_bytes and box.shape else list(box.shape)
        if dtype.safetensors is None:
            shape.append(dtype.size_bytes)
        end = start + count * row_bytes
        entries[key] = {"dtype": dtype.safetensors or "U8", "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    padding = -(8 + len(text)) % ALIGNMENT_BYTES
    return (len(text) + padding).to_bytes(8, "little") + text + b" " * padding


def boxes_digest(boxes: Sequence[LayoutBox]) -> str:
    """Return the digest of how the tensors of one process lie: names, types, shapes and boxes in the order of the file.

    Of several ranks `cut_digest` tells that, which a leader can make for thousands.

    Spec: C4.
    """
    return _digest_in_order(sorted(boxes, key=_order))


def _digest_in_order(boxes: Sequence[LayoutBox]) -> str:
    rows = [[box.item, box.name, box.dtype, box.global_shape, box.offset, box.shape] for box in boxes]
    return digest_bytes(msgspec.json.encode(rows))


def _unsigned(entry: Entry) -> Tensor:
    """Return what an index says of an entry, but for the digests."""
    box = entry.box
    chunks = tuple(Chunk(chunk.rows, 0, chunk.offset_bytes, chunk.size_bytes, "") for chunk in entry.chunks)
    return Tensor(box.item, box.name, box.dtype, box.global_shape, box.offset, box.shape, chunks)


def _order(box: LayoutBox) -> tuple[int, str, str, Shape]:
    return (-DTYPES[box.dtype].size_bytes, box.item, box.name, box.offset)


def _chunks(box: LayoutBox, begin: int) -> tuple[ChunkForm, ...]:
    row_bytes = box.row_bytes
    return tuple(
        ChunkForm((start, stop), begin + start * row_bytes, (stop - start) * row_bytes)
        for start, stop in split_rows(box.shape, DTYPES[box.dtype].size_bytes)
    )
