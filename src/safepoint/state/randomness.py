"""Random streams as items: the global ones of this process, and generators of the user's own.

1. Reading and setting a state draws nothing.
2. States are stored as bytes of the tree: they pass through no device map and stay in host memory.
3. The stream of an accelerator counts only if this process has begun to use it: asking for its state would begin it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from safepoint.errors import CorruptionError, Difference
from safepoint.state.item import STREAMS_ITEM, CapturedItem, Permits, SavedItem, Target

_ENGINES = ("cuda", "xpu", "mps")


@dataclass(frozen=True, slots=True)
class RandomStreams:
    """Hold the states of the global streams, plain: ``python``, ``numpy``, ``torch`` and each accelerator in use."""

    states: Mapping[str, Any]

    @staticmethod
    def snapshot() -> RandomStreams:
        """Return the states now."""
        states: dict[str, Any] = {
            "python": _pack_python(random.getstate()),
            "numpy": _pack(np.random.get_state(legacy=False)),
            "torch": _to_bytes(torch.get_rng_state()),
        }
        for kind in _ENGINES:
            if _is_begun(kind):
                states[kind] = [_to_bytes(state) for state in _device_states(kind)]
        return RandomStreams(states)

    def moved(self) -> list[str]:
        """Return the names of the streams that have moved since."""
        now = RandomStreams.snapshot().states
        return [name for name, state in self.states.items() if now.get(name) != state]

    def put_back(self) -> None:
        """Set all streams of this process to these states; streams that are not among them stay."""
        for name, state in self.states.items():
            if name == "python":
                random.setstate(_unpack_python(state))
            elif name == "numpy":
                np.random.set_state(_unpack(state))
            elif name == "torch":
                torch.set_rng_state(_to_tensor(state))
            elif name in _ENGINES and _is_present(name):
                _set_device_states(name, [_to_tensor(one) for one in state])


class GlobalRandomItem:
    """Capture and restore the global streams; a checkpoint has them without being asked."""

    type = "global_random"

    def __init__(self, name: str = STREAMS_ITEM) -> None:
        self._name = name

    @property
    def name(self) -> str:
        """Return the item's name."""
        return self._name

    def capture(self) -> CapturedItem:
        """Return the states of all global streams."""
        return CapturedItem(self.type, dict(RandomStreams.snapshot().states))

    def check(self, saved: SavedItem) -> Sequence[Difference]:
        """Return a difference for each kind of device whose number of streams is not the same."""
        if saved.type != self.type:
            return [Difference("rng", self._name, saved.type, self.type)]
        states = _dict(saved.plain)
        found = []
        for kind in _ENGINES:
            before = len(states.get(kind, ()))
            is_used = _is_begun(kind) or (kind in states and _is_present(kind))
            now = _device_count(kind) if is_used else 0
            if before != now:
                found.append(Difference("rng", f"random streams of {kind}", f"{before} devices", f"{now} devices"))
        generator = np.random.get_state(legacy=False)["bit_generator"]
        before_name = _dict(states.get("numpy")).get("bit_generator")
        if before_name != generator:
            found.append(Difference("rng", "global numpy stream", str(before_name), str(generator)))
        return found

    def targets(self, saved: SavedItem, permits: Permits) -> Mapping[str, Target]:
        """Return nothing: states are bytes of the tree."""
        return {}

    def apply(self, saved: SavedItem, permits: Permits) -> Sequence[str]:
        """Set the streams; with ``rng`` permitted, those that have no saved state of their own stay."""
        unequal = {difference.subject for difference in self.check(saved)}
        skipped = [kind for kind in _ENGINES if f"random streams of {kind}" in unequal]
        skipped += ["numpy"] if "global numpy stream" in unequal else []
        states = {name: state for name, state in _dict(saved.plain).items() if name not in skipped}
        RandomStreams(states).put_back()
        return [f"random stream {name}" for name in skipped]


class TorchGeneratorItem:
    """Capture and restore a `torch.Generator`."""

    type = "torch_generator"

    def __init__(self, name: str, generator: torch.Generator) -> None:
        self._name = name
        self._generator = generator

    @property
    def name(self) -> str:
        """Return the item's name, as registered."""
        return self._name

    def capture(self) -> CapturedItem:
        """Return the state and the kind of device, which sets its form."""
        state = _to_bytes(self._generator.get_state())
        return CapturedItem(self.type, {"form": self._generator.device.type, "state": state})

    def check(self, saved: SavedItem) -> Sequence[Difference]:
        """Return a difference when the generator is of another kind of device."""
        return _compare_form(self._name, self.type, self._generator.device.type, saved)

    def targets(self, saved: SavedItem, permits: Permits) -> Mapping[str, Target]:
        """Return nothing: the state is bytes of the tree."""
        return {}

    def apply(self, saved: SavedItem, permits: Permits) -> Sequence[str]:
        """Set the state, unless a permitted difference of kind makes it impossible."""
        if self.check(saved):
            return ["the generator"]
        self._generator.set_state(_to_tensor(_dict(saved.plain)["state"]))
        return []


class NumpyGeneratorItem:
    """Capture and restore a `numpy.random.Generator` or `RandomState`, whatever its bit generator."""

    type = "numpy_generator"

    def __init__(self, name: str, generator: np.random.Generator | np.random.RandomState) -> None:
        self._name = name
        self._generator = generator

    @property
    def name(self) -> str:
        """Return the item's name, as registered."""
        return self._name

    def capture(self) -> CapturedItem:
        """Return the state, and which bit generator it is of."""
        return CapturedItem(self.type, {"form": self._form(), "state": _pack(self._get())})

    def check(self, saved: SavedItem) -> Sequence[Difference]:
        """Return a difference when class or bit generator are not the same."""
        return _compare_form(self._name, self.type, self._form(), saved)

    def targets(self, saved: SavedItem, permits: Permits) -> Mapping[str, Target]:
        """Return nothing: the state is bytes of the tree."""
        return {}

    def apply(self, saved: SavedItem, permits: Permits) -> Sequence[str]:
        """Set the state, unless a permitted difference of kind makes it impossible."""
        if self.check(saved):
            return ["the generator"]
        state = _unpack(_dict(saved.plain)["state"])
        if isinstance(self._generator, np.random.RandomState):
            self._generator.set_state(state)
        else:
            self._generator.bit_generator.state = state
        return []

    def _form(self) -> str:
        return f"{type(self._generator).__name__} over {self._get()['bit_generator']}"

    def _get(self) -> dict[str, Any]:
        if isinstance(self._generator, np.random.RandomState):
            return dict(self._generator.get_state(legacy=False))
        return dict(self._generator.bit_generator.state)


class PythonRandomItem:
    """Capture and restore a `random.Random`."""

    type = "python_random"

    def __init__(self, name: str, generator: random.Random) -> None:
        self._name = name
        self._generator = generator

    @property
    def name(self) -> str:
        """Return the item's name, as registered."""
        return self._name

    def capture(self) -> CapturedItem:
        """Return the state."""
        state = self._generator.getstate()
        return CapturedItem(self.type, {"form": f"version {state[0]}", "state": _pack_python(state)})

    def check(self, saved: SavedItem) -> Sequence[Difference]:
        """Return a difference when Python's form of the state has changed."""
        return _compare_form(self._name, self.type, f"version {self._generator.getstate()[0]}", saved)

    def targets(self, saved: SavedItem, permits: Permits) -> Mapping[str, Target]:
        """Return nothing: the state is bytes of the tree."""
        return {}

    def apply(self, saved: SavedItem, permits: Permits) -> Sequence[str]:
        """Set the state, unless a permitted difference of form makes it impossible."""
        if self.check(saved):
            return ["the generator"]
        self._generator.setstate(_unpack_python(_dict(saved.plain)["state"]))
        return []


def _compare_form(name: str, kind: str, form: str, saved: SavedItem) -> list[Difference]:
    if saved.type != kind:
        return [Difference(f"{name}.type", name, saved.type, kind)]
    before = str(_dict(saved.plain).get("form"))
    return [] if before == form else [Difference(f"{name}.type", name, before, form)]


def _pack_python(state: Any) -> tuple[int, bytes, float | None]:
    version, words, gauss = state
    return (version, b"".join(word.to_bytes(4, "little") for word in words), gauss)


def _unpack_python(packed: Any) -> tuple[int, tuple[int, ...], float | None]:
    version, data, gauss = packed
    return (version, tuple(int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)), gauss)


def _pack(state: Any) -> Any:
    """Return numpy's nested state with its arrays as (dtype, shape, bytes)."""
    if isinstance(state, dict):
        return {key: _pack(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        return (state.dtype.newbyteorder("<").str, state.shape, state.astype(state.dtype.newbyteorder("<")).tobytes())
    return state.item() if isinstance(state, np.generic) else state


def _unpack(packed: Any) -> Any:
    if isinstance(packed, dict):
        return {key: _unpack(value) for key, value in packed.items()}
    if isinstance(packed, tuple):
        dtype, shape, data = packed
        return np.frombuffer(data, dtype=dtype).reshape(shape).copy()
    return packed


def _to_bytes(state: torch.Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _to_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _dict(plain: Any) -> dict[str, Any]:
    if type(plain) is not dict:
        raise CorruptionError("a stored random stream is malformed", expected="dict", found=type(plain).__name__)
    return plain


def _is_present(kind: str) -> bool:
    engine = getattr(torch, kind, None)
    return engine is not None and bool(engine.is_available())


def _is_begun(kind: str) -> bool:
    # MPS has one device and no lazy start to ask for.
    return _is_present(kind) and (kind == "mps" or bool(getattr(torch, kind).is_initialized()))


def _device_count(kind: str) -> int:
    return 1 if kind == "mps" else int(getattr(torch, kind).device_count())


def _device_states(kind: str) -> list[torch.Tensor]:
    engine: Any = getattr(torch, kind)
    return [engine.get_rng_state()] if kind == "mps" else list(engine.get_rng_state_all())


def _set_device_states(kind: str, states: list[torch.Tensor]) -> None:
    engine: Any = getattr(torch, kind)
    if kind == "mps":
        engine.set_rng_state(states[0])
    else:
        engine.set_rng_state_all(states)
