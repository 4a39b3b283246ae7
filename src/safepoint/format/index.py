"""A rank's index: which tensors it stored, where each chunk lies, and its plain values.

Spec: F3, F4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter, itemgetter
from typing import Annotated, Any

import msgspec

from safepoint.errors import CorruptionError
from safepoint.format.digest import digest_file, is_digest
from safepoint.format.dtypes import DTYPES
from safepoint.format.encoding import unseal
from safepoint.format.extent import check_shape, element_count
from safepoint.format.names import GenerationName, data_name, is_data_name, is_item_name, is_object_name

_NAMED: Callable[[Any], tuple[str, str]] = attrgetter("item", "name")
_ITEM: Callable[[tuple[str, str]], str] = itemgetter(0)

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class ObjectReference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Name one object of a generation, with its size and digest. An ancestor's object is named by its generation."""

    generation: str
    name: str
    size_bytes: Count
    digest: str


class Chunk(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Name the bytes of a range of rows: `object` counts in the index's list, `offset_bytes` from the file's begin."""

    rows: tuple[Count, Count]
    object: Count
    offset_bytes: Count
    size_bytes: Count
    digest: str


class Tensor(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Describe one box of one tensor: `item` is the item's name, `name` the tensor's within it.

    An index may list several boxes of one tensor, at different offsets.
    """

    item: str
    name: str
    dtype: str
    global_shape: tuple[Count, ...]
    offset: tuple[Count, ...]
    shape: tuple[Count, ...]
    chunks: tuple[Chunk, ...]


class IndexedItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hold an item's type and its plain tree in JSON form."""

    type: str
    plain: Any


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """List what one rank stored in one generation.

    `items` holds the items whose plain tree this rank stored; one of several ranks may store tensors of other items.
    """

    generation: str
    rank: Count
    world_size: Count
    header_bytes: Count
    header_digest: str
    objects: tuple[ObjectReference, ...]
    items: dict[str, IndexedItem]
    tensors: tuple[Tensor, ...]


def decode_index(data: bytes, *, where: str, are_boxes_sound: Callable[[Index], bool] = lambda index: False) -> Index:
    """Return a rank's index, having checked everything that can be checked without its data.

    Args:
        data: The whole file.
        where: The file's path, for messages.
        are_boxes_sound: Looks at all boxes and chunks at once, as `safepoint.format.chunks` does, which needs numpy.
            Where it does not say yes, they are looked at one by one.

    Raises:
        CorruptionError: A digest, name, shape, range or reference is not right.

    Spec: F3.
    """
    index = unseal(data, Index, where=where)
    if GenerationName.parse(index.generation) is None or index.rank >= index.world_size:
        raise CorruptionError("an index names no rank of a generation", where=where, found=index.generation[:80])
    if not is_digest(index.header_digest):
        raise CorruptionError("an index holds no digest of its header", where=where, found=index.header_digest[:80])
    for item in index.items:
        if not is_item_name(item):
            raise CorruptionError("an item's name is not allowed", where=where, found=repr(item[:80]))
    _check_objects(index, where)
    is_sound = are_boxes_sound(index)
    _check_boxes(index, where, is_each_sound=is_sound)
    if not is_sound:
        _check_ranges(index, where)
    return index


def entry_keys(boxes: Iterable[tuple[str, str, tuple[int, ...]]]) -> list[str]:
    """Return the key of each box in the header of a data file, for the boxes of an index in their order.

    Args:
        boxes: Item, name and offset of each.

    Spec: F3.3.
    """
    listed = list(boxes)
    plain = [f"{item}/{name}" for item, name, _ in listed]
    if len(set(plain)) == len(plain):
        return plain
    counts: dict[tuple[str, str], int] = {}
    for item, name, _ in listed:
        counts[item, name] = counts.get((item, name), 0) + 1
    keys: dict[str, None] = {}
    for item, name, offset in listed:
        key = f"{item}/{name}" if counts[item, name] == 1 else f"{item}/{name}@{','.join(map(str, offset))}"
        while key in keys:
            # Another tensor's name ends like the key of a box.
            key += "@"
        keys[key] = None
    return list(keys)


def check_reference(reference: ObjectReference, *, where: str) -> GenerationName:
    """Return the generation that an object lies in, or raise `CorruptionError` when a name is outside the grammar."""
    owner = GenerationName.parse(reference.generation)
    if owner is None or not is_object_name(reference.name) or not is_digest(reference.digest):
        raise CorruptionError(
            "an object's name is not one that this format makes",
            where=where,
            expected="a generation, an object name, a digest",
            found=repr((reference.generation[:80], reference.name[:80], reference.digest[:80])),
        )
    return owner


def _check_objects(index: Index, where: str) -> None:
    seen: set[tuple[str, str]] = set()
    prefix = data_name(index.rank, index.world_size).removesuffix(".safetensors") + "."
    for reference in index.objects:
        check_reference(reference, where=where)
        is_own = reference.generation == index.generation
        if not is_data_name(reference.name) or (is_own and not reference.name.startswith(prefix)):
            raise CorruptionError(
                "an index names a file that holds no data of its rank", where=where, found=reference.name
            )
        if (reference.generation, reference.name) in seen:
            raise CorruptionError("an index names an object twice", where=where, found=reference.name)
        seen.add((reference.generation, reference.name))


def _check_boxes(index: Index, where: str, *, is_each_sound: bool) -> None:
    """Check each box for itself, and that those of one tensor speak of the same one."""
    names = set(map(_NAMED, index.tensors))
    if is_each_sound and len(names) == len(index.tensors) and all(map(index.items.__contains__, map(_ITEM, names))):
        # Nearly all are boxes of tensors of their own, and then there is nothing that one could contradict.
        return
    seen: set[tuple[str, str, tuple[int, ...]]] = set()
    wholes: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {}
    allowed = set(index.items)
    for tensor in index.tensors:
        key = (tensor.item, tensor.name, tensor.offset)
        if key in seen:
            raise CorruptionError("a tensor is listed twice", where=_place(where, tensor))
        seen.add(key)
        if tensor.item not in allowed:
            if index.world_size == 1 or not is_item_name(tensor.item):
                raise CorruptionError("a tensor belongs to no item", where=_place(where, tensor))
            allowed.add(tensor.item)
        whole = (tensor.dtype, tensor.global_shape)
        if wholes.setdefault(key[:2], whole) != whole:
            where = _place(where, tensor)
            raise CorruptionError("two boxes of a tensor contradict each other", where=where, found=whole)
        if not is_each_sound:
            _check_tensor(tensor, index.objects, _place(where, tensor))


def _place(where: str, tensor: Tensor) -> str:
    return f"{where}: {tensor.item[:128]}/{tensor.name[:256]}"


def _check_tensor(tensor: Tensor, objects: tuple[ObjectReference, ...], place: str) -> None:
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise CorruptionError("a tensor has an unknown element type", where=place, found=repr(tensor.dtype[:40]))
    axes = len(tensor.global_shape)
    check_shape(tensor.global_shape, dtype.size_bytes, where=place)
    size_bytes = check_shape(tensor.shape, dtype.size_bytes, where=place)
    if len(tensor.shape) != axes or len(tensor.offset) != axes:
        raise CorruptionError("a tensor's box has the wrong number of axes", where=place, expected=axes)
    is_whole = tensor.shape == tensor.global_shape and not any(tensor.offset)
    if not is_whole and any(
        o + n > g for o, n, g in zip(tensor.offset, tensor.shape, tensor.global_shape, strict=True)
    ):
        raise CorruptionError("a box lies outside its tensor", where=place, found=f"{tensor.offset} + {tensor.shape}")
    row_bytes = element_count(tensor.shape[1:]) * dtype.size_bytes
    next_row = 0
    for chunk in tensor.chunks:
        start, stop = chunk.rows
        if start != next_row or stop <= start or chunk.size_bytes != (stop - start) * row_bytes:
            raise CorruptionError("a chunk does not follow the one before it", where=place, found=f"rows {chunk.rows}")
        if chunk.object >= len(objects) or not is_digest(chunk.digest):
            raise CorruptionError("a chunk names no object or no digest", where=place, found=chunk.object)
        if chunk.offset_bytes + chunk.size_bytes > objects[chunk.object].size_bytes:
            raise CorruptionError("a chunk ends behind the end of its object", where=place, found=chunk.offset_bytes)
        next_row = stop
    rows = (tensor.shape[0] if tensor.shape else 1) if size_bytes else 0
    if next_row != rows:
        raise CorruptionError("a tensor's chunks do not cover it", where=place, expected=f"{rows} rows", found=next_row)


def _check_ranges(index: Index, where: str) -> None:
    """Check that this generation's chunks fill its data file from the header's end to the file's end, once.

    The file's digest is that of its parts, so it needs no look at the file either.
    """
    by_object: dict[int, list[Chunk]] = {}
    for chunk in (chunk for tensor in index.tensors for chunk in tensor.chunks):
        by_object.setdefault(chunk.object, []).append(chunk)
    for number, reference in enumerate(index.objects):
        if reference.generation != index.generation:
            continue
        place = f"{where}: {reference.name}"
        chunks = sorted(by_object.get(number, ()), key=lambda chunk: chunk.offset_bytes)
        end = index.header_bytes
        for chunk in chunks:
            if chunk.offset_bytes != end:
                found = chunk.offset_bytes
                raise CorruptionError("chunks overlap or leave a hole", where=place, expected=end, found=found)
            end += chunk.size_bytes
        size = reference.size_bytes
        if end != size:
            raise CorruptionError("the chunks do not fill their data file", where=place, expected=size, found=end)
        digest = digest_file(index.header_digest, (chunk.digest for chunk in chunks))
        if digest != reference.digest:
            raise CorruptionError(
                "a data file's digest is not that of its parts", where=place, expected=digest, found=reference.digest
            )
