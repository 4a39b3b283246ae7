"""Form: what a rank's data file looks like, known before any byte of it is read.

The form follows from which boxes the file holds, and so it is the same from save to save; only digests differ.

Spec: F3.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import msgspec

from safepoint.format.digest import digest_bytes
from safepoint.format.dtypes import DTYPES
from safepoint.format.extent import Shape, element_count, split_rows
from safepoint.format.index import entry_keys
from safepoint.saving.layout import LayoutBox, cut_digest
from safepoint.saving.spans import Spans
from safepoint.saving.wording import Wording

ALIGNMENT_BYTES = 4096
_KEYED = attrgetter("item", "name", "offset")
_NAMED = attrgetter("item", "name", "dtype", "global_shape", "offset", "shape")


class ChunkForm(msgspec.Struct, frozen=True, gc=False):
    """Say which rows of its box a chunk holds, and where it lies in the file."""

    rows: tuple[int, int]
    offset_bytes: int
    size_bytes: int


class Entry(msgspec.Struct, frozen=True, gc=False):
    """Say where a box lies in the file; `number` is its place among the boxes that the form was made of."""

    number: int
    box: LayoutBox
    offset_bytes: int
    size_bytes: int
    chunks: tuple[ChunkForm, ...]


@dataclass(frozen=True, slots=True)
class FileForm:
    """Hold the header of a data file, and its entries in their order; there are no holes.

    `spans` tell where the entries lie. `extents` are the sizes of all that has a digest of its own, in the order of the
    file: the header, then each chunk. `layout` is the digest of the boxes that is voted with. `wording` is what
    the rank says of these boxes; absent where other files hold some of their chunks.
    """

    header: bytes
    entries: tuple[Entry, ...]
    spans: Spans
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
    numbers = _order(boxes)
    in_file = [boxes[number] for number in numbers]
    header = encode_header(in_file)
    # Most tensors of a model and of its optimizer have one of a few types and shapes.
    cut = functools.cache(_cut)
    entries, end = [], len(header)
    for number, box in zip(numbers, in_file, strict=True):
        size_bytes, parts = cut(box.dtype, box.shape)
        chunks = tuple([ChunkForm(rows, end + begin, length) for rows, begin, length in parts])
        entries.append(Entry(number, box, end, size_bytes, chunks))
        end += size_bytes
    layout = _digest_in_order(in_file) if is_alone else cut_digest(boxes)
    chunks_of = [entry.chunks for entry in entries]
    sizes = (chunk.size_bytes for chunks in chunks_of for chunk in chunks)
    wording = Wording(in_file, chunks_of, is_alone=is_alone)
    return FileForm(header, tuple(entries), Spans.of(entries), (len(header), *sizes), end, layout, wording)


def encode_header(boxes: Sequence[LayoutBox], *, rows: Sequence[int] | None = None) -> bytes:
    """Return the safetensors header of a file of boxes in this order, padded so that data begins on a 4,096-byte line.

    Args:
        boxes: The boxes.
        rows: How many rows of each the file holds; all, if absent. A box of which it holds none has no entry.

    Spec: F3.
    """
    keys = entry_keys(map(_KEYED, boxes))
    counts = rows or [shape[0] if shape else 1 for shape in map(attrgetter("shape"), boxes)]
    described = functools.cache(_described)
    lines, start = ['"__metadata__":{"format":"pt"}'], 0
    for key, box, count in zip(_as_json(keys), boxes, counts, strict=True):
        size_bytes, description = described(box.dtype, box.shape, count)
        if description:
            lines.append(f'{key}:{{{description},"data_offsets":[{start},{start + size_bytes}]}}')
            start += size_bytes
    whole = f"{{{','.join(lines)}}}".encode("ascii")
    padding = -(8 + len(whole)) % ALIGNMENT_BYTES
    return (len(whole) + padding).to_bytes(8, "little") + whole + b" " * padding


def boxes_digest(boxes: Sequence[LayoutBox]) -> str:
    """Return the digest of how the tensors of one process lie: names, types, shapes and boxes in the order of the file.

    Of several ranks `cut_digest` tells that, which a leader can make for thousands.

    Spec: C4.
    """
    return _digest_in_order([boxes[number] for number in _order(boxes)])


def _digest_in_order(boxes: Sequence[LayoutBox]) -> str:
    return digest_bytes(msgspec.json.encode(list(map(_NAMED, boxes))))


def _order(boxes: Sequence[LayoutBox]) -> list[int]:
    """Return the numbers of boxes in the order in which their file holds them."""
    ranks = {dtype: -DTYPES[dtype].size_bytes for dtype in {box.dtype for box in boxes}}
    keys = [(ranks[box.dtype], box.item, box.name, box.offset) for box in boxes]
    return sorted(range(len(boxes)), key=keys.__getitem__)


def _as_json(keys: Sequence[str]) -> list[str]:
    # Within a text of JSON the end of a line is written with a backslash.
    listed = json.dumps(keys, separators=("\n", ":"), ensure_ascii=True)[1:-1]
    return listed.split("\n") if keys else []


def _described(dtype: str, shape: Shape, count: int) -> tuple[int, str]:
    """Return the size of so many rows of a box, and what a header says of them; nothing where it does not list them."""
    kind, has_bytes = DTYPES[dtype], element_count(shape) > 0
    if has_bytes and not count:
        return 0, ""
    lengths = [count, *shape[1:]] if has_bytes and shape else list(shape)
    if kind.safetensors is None:
        lengths.append(kind.size_bytes)
    size_bytes = count * element_count(shape[1:]) * kind.size_bytes
    return size_bytes, f'"dtype":"{kind.safetensors or "U8"}","shape":[{",".join(map(str, lengths))}]'


def _cut(dtype: str, shape: Shape) -> tuple[int, list[tuple[tuple[int, int], int, int]]]:
    """Return the size of a box, and of each of its chunks the rows, where it begins in the box, and its size."""
    item_bytes = DTYPES[dtype].size_bytes
    row_bytes = element_count(shape[1:]) * item_bytes
    ranges = split_rows(shape, item_bytes)
    parts = [((start, stop), start * row_bytes, (stop - start) * row_bytes) for start, stop in ranges]
    return element_count(shape) * item_bytes, parts
