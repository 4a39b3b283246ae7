"""Random streams as items: the global ones of this process, and generators of the user's own.

1. Reading and setting a state draws nothing.
2. States are stored as bytes of the tree: they pass through no device map and stay in host memory.
3. The stream of an accelerator counts only if this process has begun to use it: asking for its state would begin it.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from safepoint.errors import Difference
from safepoint.state.item import STREAMS_ITEM, CapturedItem, Permits, SavedItem, Target
from safepoint.state.stored import elements, malformed, reading, record

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
        states = _parse_streams(saved.plain, self._name)
        found = []
        for kind in _ENGINES:
            before = len(states.get(kind, ()))
            is_used = _is_begun(kind) or (kind in states and _is_present(kind))
            now = _device_count(kind) if is_used else 0
            if before != now:
                found.append(Difference("rng", f"random streams of {kind}", f"{before} devices", f"{now} devices"))
        generator = np.random.get_state(legacy=False)["bit_generator"]
        before_name = states["numpy"].get("bit_generator")
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
        states = _parse_streams(saved.plain, self._name)
        states = {name: state for name, state in states.items() if name not in skipped}
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
        if saved.type != self.type:
            return [Difference(f"{self._name}.type", self._name, saved.type, self.type)]
        form, state = _parse_form(saved, bytes, self._name)
        found = _compare_form(self._name, form, self._generator.device.type)
        if not found:
            _try_torch(state, form, self._name)
        return found

    def targets(self, saved: SavedItem, permits: Permits) -> Mapping[str, Target]:
        """Return nothing: the state is bytes of the tree."""
        return {}

    def apply(self, saved: SavedItem, permits: Permits) -> Sequence[str]:
        """Set the state, unless a permitted difference of kind makes it impossible."""
        if self.check(saved):
            return ["the generator"]
        self._generator.set_state(_to_tensor(_parse_form(saved, bytes, self._name)[1]))
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
        return CapturedItem(self.type, {"form": self._form(), "state": _pack(_numpy_state(self._generator))})

    def check(self, saved: SavedItem) -> Sequence[Difference]:
        """Return a difference when class or bit generator are not the same."""
        if saved.type != self.type:
            return [Difference(f"{self._name}.type", self._name, saved.type, self.type)]
        form, state = _parse_form(saved, dict, self._name)
        found = _compare_form(self._name, form, self._form())
        if not found:
            _try_numpy(copy.deepcopy(self._generator), state, self._name)
        return found

    def targets(self, saved: SavedItem, permits: Permits) -> Mapping[str, Target]:
        """Return nothing: the state is bytes of the tree."""
        return {}

    def apply(self, saved: SavedItem, permits: Permits) -> Sequence[str]:
        """Set the state, unless a permitted difference of kind makes it impossible."""
        if self.check(saved):
            return ["the generator"]
        _set_numpy(self._generator, _parse_form(saved, dict, self._name)[1])
        return []

    def _form(self) -> str:
        return f"{type(self._generator).__name__} over {_numpy_state(self._generator)['bit_generator']}"


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
        if saved.type != self.type:
            return [Difference(f"{self._name}.type", self._name, saved.type, self.type)]
        form, state = _parse_form(saved, tuple, self._name)
        found = _compare_form(self._name, form, f"version {self._generator.getstate()[0]}")
        if not found:
            _try_python(state, self._name)
        return found

    def targets(self, saved: SavedItem, permits: Permits) -> Mapping[str, Target]:
        """Return nothing: the state is bytes of the tree."""
        return {}

    def apply(self, saved: SavedItem, permits: Permits) -> Sequence[str]:
        """Set the state, unless a permitted difference of form makes it impossible."""
        if self.check(saved):
            return ["the generator"]
        self._generator.setstate(_unpack_python(_parse_form(saved, tuple, self._name)[1]))
        return []


def _compare_form(name: str, saved: str, live: str) -> list[Difference]:
    return [] if saved == live else [Difference(f"{name}.type", name, saved, live)]


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


def _parse_streams(plain: Any, item: str) -> dict[str, Any]:
    """Return the states of the global streams, each known to be one that can be set."""
    engines = {kind: list for kind in _ENGINES if isinstance(plain, dict) and kind in plain}
    states = record(plain, {"python": tuple, "numpy": dict, "torch": bytes, **engines}, item=item)
    _try_python(states["python"], item)
    if states["numpy"].get("bit_generator") == np.random.get_state(legacy=False)["bit_generator"]:
        _try_numpy(np.random.RandomState(0), states["numpy"], item)
    _try_torch(states["torch"], "cpu", item)
    for kind in engines:
        for state in elements(states[kind], bytes, item=item):
            _try_torch(state, kind, item)
    return states


def _parse_form(saved: SavedItem, kind: type, item: str) -> tuple[str, Any]:
    whole = record(saved.plain, {"form": str, "state": kind}, item=item)
    return whole["form"], whole["state"]


def _try_python(state: Any, item: str) -> None:
    """Set a state in a generator of our own; what it then tells must be the same, or it is damage."""
    with reading(item):
        trial = random.Random(0)
        trial.setstate(_unpack_python(state))
        _check_same(_pack_python(trial.getstate()), state, item)


def _try_numpy(trial: np.random.Generator | np.random.RandomState, state: dict[str, Any], item: str) -> None:
    """Set a state in a generator that is not the live one; numpy checks neither `pos` nor `buffer_pos`, so we do."""
    with reading(item):
        inner = state["state"]
        limits = [(inner, "pos", 624), (state, "buffer_pos", 4)]
        for holder, key, most in limits:
            if key in holder and not 0 <= holder[key] <= most:
                raise malformed(item, f"{key} of at most {most}", str(holder[key]))
        _set_numpy(trial, state)
        _check_same(_pack(_numpy_state(trial)), state, item)


def _try_torch(state: bytes, kind: str, item: str) -> None:
    if kind != "cpu" and not _is_present(kind):
        return
    with reading(item):
        trial = torch.Generator(device=kind)
        trial.set_state(_to_tensor(state))
        _check_same(_to_bytes(trial.get_state()), state, item)


def _check_same(found: object, saved: object, item: str) -> None:
    # Compared as text too: 1, 1.0 and True are equal, and not the same state.
    if found != saved or repr(found) != repr(saved):
        raise malformed(item, "a state that a generator takes as it is", str(saved)[:80])


def _numpy_state(generator: np.random.Generator | np.random.RandomState) -> dict[str, Any]:
    if isinstance(generator, np.random.RandomState):
        return dict(generator.get_state(legacy=False))
    return dict(generator.bit_generator.state)


def _set_numpy(generator: np.random.Generator | np.random.RandomState, state: dict[str, Any]) -> None:
    if isinstance(generator, np.random.RandomState):
        generator.set_state(_unpack(state))
    else:
        generator.bit_generator.state = _unpack(state)


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
