"""Random streams as items: the global ones of this process, and generators of the user's own.

1. Reading and setting a state draws nothing.
2. States are stored as bytes of the tree: they pass through no device map and stay in host memory.
3. The stream of an accelerator counts only if this process has begun to use it: asking for its state would begin it.
"""

from __future__ import annotations

import copy
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from safepoint.errors import Difference
from safepoint.format.stencil import encode_text
from safepoint.state import numpy_streams
from safepoint.state.item import STREAMS_ITEM, CapturedItem, Permits, SavedItem, Target
from safepoint.state.stored import elements, malformed, reading, record

_ENGINES = ("cuda", "xpu", "mps")

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


@dataclass(frozen=True, slots=True)
class RandomStreams:
    """Hold the states of the global streams, plain: ``python``, ``numpy``, ``torch`` and each accelerator in use."""

    states: Mapping[str, Any]

    @staticmethod
    def snapshot() -> RandomStreams:
        """Return the states now."""
        states: dict[str, Any] = {
            "python": _pack_python(random.getstate()),
            "numpy": numpy_streams.pack(np.random.get_state(legacy=False)),
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
                np.random.set_state(numpy_streams.unpack(state))
            elif name == "torch":
                torch.set_rng_state(_to_tensor(state))
            elif name in _ENGINES and _is_present(name):
                _set_device_states(name, [_to_tensor(one) for one in state])


class GlobalRandomItem:
    """Capture and restore the global streams; a checkpoint has them without being asked.

    Args:
        name: The item's name.
        streams: What is captured; the streams as they are at each capture if absent.
    """

    type = "global_random"

    def __init__(self, name: str = STREAMS_ITEM, *, streams: RandomStreams | None = None) -> None:
        self._name = name
        self._streams = streams
        # What a check found to be sound is what is applied after it.
        self._parsed: tuple[SavedItem, str, dict[str, Any]] | None = None

    @property
    def name(self) -> str:
        """Return the item's name."""
        return self._name

    def capture(self) -> CapturedItem:
        """Return the states of all global streams."""
        streams = self._streams or RandomStreams.snapshot()
        return CapturedItem(self.type, encode_text(dict(streams.states), path=self.name))

    def check(self, saved: SavedItem) -> Sequence[Difference]:
        """Return a difference for each kind of device whose number of streams is not the same."""
        if saved.type != self.type:
            return [Difference("rng", self._name, saved.type, self.type)]
        return _unlike(self._states(saved))

    def derive(self, seed_of: Callable[[str], int]) -> object | None:
        """Return all streams begun anew; those of an accelerator by the number of the device."""
        numpy_state = numpy_streams.begun(numpy_streams.global_name(), seed_of("numpy"), is_legacy=True)
        if numpy_state is None:
            return None
        states: dict[str, Any] = {
            "python": _pack_python(random.Random(seed_of("python")).getstate()),
            "numpy": numpy_state,
            "torch": _torch_begun("cpu", seed_of("torch")),
        }
        for kind in filter(_is_begun, _ENGINES):
            names = [f"{kind}:{number}" for number in range(_device_count(kind))]
            states[kind] = [_torch_begun("mps" if kind == "mps" else name, seed_of(name)) for name in names]
        return states

    def targets(self, saved: SavedItem, permits: Permits) -> Mapping[str, Target]:
        """Return nothing: states are bytes of the tree."""
        return {}

    def apply(self, saved: SavedItem, permits: Permits) -> Sequence[str]:
        """Set the streams; with ``rng`` permitted, those that have no saved state of their own stay."""
        states = self._states(saved)
        self._parsed = None
        unequal = {difference.subject for difference in _unlike(states)}
        skipped = [kind for kind in _ENGINES if f"random streams of {kind}" in unequal]
        skipped += ["numpy"] if "global numpy stream" in unequal else []
        states = {name: state for name, state in states.items() if name not in skipped}
        RandomStreams(states).put_back()
        return [f"random stream {name}" for name in skipped]

    def _states(self, saved: SavedItem) -> dict[str, Any]:
        """Return the saved states, known to be ones that the streams of now take."""
        name = numpy_streams.global_name()
        if self._parsed is None or self._parsed[0] is not saved or self._parsed[1] != name:
            self._parsed = saved, name, _parse_streams(saved.plain, self._name)
        return self._parsed[2]


class GeneratorItem:
    """Capture and restore a generator of the user's: of torch, of numpy whatever its bit generator, or of Python."""

    def __init__(self, name: str, generator: Generator) -> None:
        self._name = name
        self._generator = generator
        self._kind = _kind_of(generator)

    @property
    def name(self) -> str:
        """Return the item's name, as registered."""
        return self._name

    @property
    def type(self) -> str:
        """Return ``torch_generator``, ``numpy_generator`` or ``python_random``."""
        return self._kind.type_name

    def capture(self) -> CapturedItem:
        """Return the state, and what sets its form: the kind of device, the bit generator, Python's version of it."""
        state = {"form": self._kind.form(self._generator), "state": self._kind.state(self._generator)}
        return CapturedItem(self.type, encode_text(state, path=self._name))

    def check(self, saved: SavedItem) -> Sequence[Difference]:
        """Return a difference when the live generator's state has another form."""
        if saved.type != self.type:
            return [Difference(f"{self._name}.type", self._name, saved.type, self.type)]
        form, state = self._parse(saved)
        live = self._kind.form(self._generator)
        if form != live:
            return [Difference(f"{self._name}.type", self._name, form, live)]
        self._kind.try_state(self._generator, state, self._name)
        return []

    def derive(self, seed_of: Callable[[str], int]) -> object | None:
        """Return the stream begun anew; None for a bit generator that is not numpy's own."""
        state = self._kind.begun(self._generator, seed_of("state"))
        return None if state is None else {"form": self._kind.form(self._generator), "state": state}

    def targets(self, saved: SavedItem, permits: Permits) -> Mapping[str, Target]:
        """Return nothing: the state is bytes of the tree."""
        return {}

    def apply(self, saved: SavedItem, permits: Permits) -> Sequence[str]:
        """Set the state, unless a permitted difference of form makes it impossible."""
        if self.check(saved):
            return ["the generator"]
        self._kind.set_state(self._generator, self._parse(saved)[1])
        return []

    def _parse(self, saved: SavedItem) -> tuple[str, Any]:
        whole = record(saved.plain, {"form": str, "state": self._kind.holder}, item=self._name)
        return whole["form"], whole["state"]


@dataclass(frozen=True, slots=True)
class _Kind:
    """Say how one kind of generator tells its state, takes it, and begins anew from a seed.

    `holder` is what a stored state is held in.
    """

    type_name: str
    holder: type
    form: Callable[[Any], str]
    state: Callable[[Any], Any]
    try_state: Callable[[Any, Any, str], None]
    set_state: Callable[[Any, Any], None]
    begun: Callable[[Any, int], Any]


def _kind_of(generator: Generator) -> _Kind:
    if isinstance(generator, torch.Generator):
        return _Kind(
            "torch_generator",
            bytes,
            form=lambda live: str(live.device.type),
            state=lambda live: _to_bytes(live.get_state()),
            try_state=lambda live, state, item: _try_torch(state, live.device.type, item),
            set_state=lambda live, state: live.set_state(_to_tensor(state)),
            begun=lambda live, seed: _torch_begun(str(live.device), seed),
        )
    if isinstance(generator, random.Random):
        return _Kind(
            "python_random",
            tuple,
            form=lambda live: f"version {live.getstate()[0]}",
            state=lambda live: _pack_python(live.getstate()),
            try_state=lambda live, state, item: _try_python(state, item),
            set_state=lambda live, state: live.setstate(_unpack_python(state)),
            begun=lambda live, seed: _pack_python(random.Random(seed).getstate()),
        )
    return _Kind(
        "numpy_generator",
        dict,
        form=lambda live: f"{type(live).__name__} over {numpy_streams.state_of(live)['bit_generator']}",
        state=lambda live: numpy_streams.pack(numpy_streams.state_of(live)),
        try_state=lambda live, state, item: _try_numpy(copy.deepcopy(live), state, item),
        set_state=numpy_streams.set_state,
        begun=lambda live, seed: numpy_streams.begun(
            str(numpy_streams.state_of(live)["bit_generator"]), seed, is_legacy=isinstance(live, np.random.RandomState)
        ),
    )


def _pack_python(state: Any) -> tuple[int, bytes, float | None]:
    version, words, gauss = state
    return (version, struct.pack(f"<{len(words)}I", *words), gauss)


def _unpack_python(packed: Any) -> tuple[int, tuple[int, ...], float | None]:
    version, data, gauss = packed
    if len(data) % 4:
        raise ValueError(f"{len(data)} bytes are no words of 4 bytes")
    return (version, struct.unpack(f"<{len(data) // 4}I", data), gauss)


def _to_bytes(state: torch.Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _to_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _parse_streams(plain: Any, item: str) -> dict[str, Any]:
    """Return the states of the global streams, each known to be one that can be set."""
    engines = {kind: list for kind in _ENGINES if isinstance(plain, dict) and kind in plain}
    states = record(plain, {"python": tuple, "numpy": dict, "torch": bytes, **engines}, item=item)
    _try_python(states["python"], item)
    if states["numpy"].get("bit_generator") == numpy_streams.global_name():
        _try_numpy(np.random.RandomState(0), states["numpy"], item)
    _try_torch(states["torch"], "cpu", item)
    for kind in engines:
        for state in elements(states[kind], bytes, item=item):
            _try_torch(state, kind, item)
    return states


def _unlike(states: Mapping[str, Any]) -> list[Difference]:
    """Return a difference for each kind of stream of which there are others here than among these states."""
    found = []
    for kind in _ENGINES:
        before = len(states.get(kind, ()))
        is_used = _is_begun(kind) or (kind in states and _is_present(kind))
        now = _device_count(kind) if is_used else 0
        if before != now:
            found.append(Difference("rng", f"random streams of {kind}", f"{before} devices", f"{now} devices"))
    before_name, name = states["numpy"].get("bit_generator"), numpy_streams.global_name()
    if before_name != name:
        found.append(Difference("rng", "global numpy stream", str(before_name), name))
    return found


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
        numpy_streams.set_state(trial, state)
        _check_same(numpy_streams.pack(numpy_streams.state_of(trial)), state, item)


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


def _torch_begun(device: str, seed: int) -> bytes:
    return _to_bytes(torch.Generator(device=device).manual_seed(seed).get_state())


def _is_present(kind: str) -> bool:
    engine = getattr(torch, kind, None)
    return engine is not None and bool(engine.is_available())


def _is_begun(kind: str) -> bool:
    # MPS has one device and no lazy start to ask for.
    is_possible = kind == "mps" or (hasattr(torch, kind) and bool(getattr(torch, kind).is_initialized()))
    return is_possible and _is_present(kind)


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
