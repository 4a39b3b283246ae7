"""Send state through its stored form and back, as the phases of a save and a restore do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from safepoint.format.plain import decode_plain, encode_plain
from safepoint.state.item import CapturedItem, Item, Permits, SavedItem
from safepoint.state.targets import NewTensorTarget
from safepoint.state.tensors import TensorSource, spec_of
from safepoint.state.tree import flatten, unflatten


def stored(value: object) -> tuple[Any, dict[str, bytes]]:
    """Return the JSON form of a value and the bytes of its tensors by name."""
    plain, tensors = flatten(value)
    form = json.loads(json.dumps(encode_plain(plain)))
    return form, {name: read(TensorSource(tensor)) for name, tensor in tensors}


def returned(value: object) -> Any:
    """Return what comes back when a value is stored and rebuilt; nothing of the original is shared."""
    plain, tensors = flatten(value)
    form = json.loads(json.dumps(encode_plain(plain)))
    rebuilt = {}
    for name, tensor in tensors:
        target = NewTensorTarget(spec_of(name, tensor), torch.device("cpu"))
        target.memory()[:] = read(TensorSource(tensor))
        target.commit()
        assert target.tensor is not None
        rebuilt[name] = target.tensor
    return unflatten(decode_plain(form), rebuilt)


def read(source: TensorSource) -> bytes:
    """Return all bytes of a source."""
    buffer = bytearray(source.nbytes)
    source.copy_into(memoryview(buffer))
    return bytes(buffer)


class Stored:
    """Hold captured items as a checkpoint would: JSON text and bytes, nothing live."""

    def __init__(self, items: Mapping[str, Item]) -> None:
        self.saved: dict[str, SavedItem] = {}
        self.data: dict[tuple[str, str], bytes] = {}
        self.text: dict[str, str] = {}
        for name, item in items.items():
            self._add(name, item.capture())

    def _add(self, name: str, captured: CapturedItem) -> None:
        self.text[name] = text = json.dumps(encode_plain(captured.plain, path=name))
        specs = {one.spec.name: one.spec for one in captured.tensors}
        assert len(specs) == len(captured.tensors)
        self.saved[name] = SavedItem(captured.type, decode_plain(json.loads(text)), specs)
        for one in captured.tensors:
            self.data[name, one.spec.name] = read(one.source)

    def restore(self, items: Mapping[str, Item], permits: Permits | None = None) -> dict[str, list[str]]:
        """Restore the items in the order given and return what each left as it was."""
        permits = permits or Permits()
        found = [one for name, item in items.items() for one in item.check(self.saved[name])]
        assert [one for one in found if one.word not in permits.words] == []
        left: dict[str, list[str]] = {}
        for name, item in items.items():
            for tensor_name, target in item.targets(self.saved[name], permits).items():
                memory = target.memory()
                assert memory.nbytes == target.nbytes
                memory[:] = self.data[name, tensor_name]
                target.commit()
            left[name] = list(item.apply(self.saved[name], permits))
        return left

    def words(self, items: Mapping[str, Item]) -> list[str]:
        """Return the permit words of all differences."""
        return [one.word for name, item in items.items() for one in item.check(self.saved[name])]


def same_bits(one: object, other: object) -> bool:
    """Return whether two values are equal bit for bit: types, order of keys, NaNs and all."""
    return stored(one) == stored(other)
