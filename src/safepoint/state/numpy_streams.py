"""numpy's random generators: their states as plain values, which arrays are not."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.random import mtrand

NumpyGenerator = np.random.Generator | np.random.RandomState


def pack(state: Any) -> Any:
    """Return numpy's nested state with its arrays as (dtype, shape, bytes)."""
    if isinstance(state, dict):
        return {key: pack(value) for key, value in state.items()}
    if isinstance(state, np.ndarray):
        stored = state.dtype.newbyteorder("<")
        return (stored.str, state.shape, state.astype(stored, copy=False).tobytes())
    return state.item() if isinstance(state, np.generic) else state


def unpack(packed: Any) -> Any:
    """Return the state that was packed."""
    if isinstance(packed, dict):
        return {key: unpack(value) for key, value in packed.items()}
    if isinstance(packed, tuple):
        dtype, shape, data = packed
        return np.frombuffer(data, dtype=dtype).reshape(shape).copy()
    return packed


def global_name() -> str:
    """Return what the bit generator of the global stream is called."""
    # It takes a Mersenne twister 60 µs to tell its state, and it is one unless the user has set another.
    if type(mtrand.get_bit_generator()) is np.random.MT19937:
        return "MT19937"
    return str(np.random.get_state(legacy=False)["bit_generator"])


def state_of(generator: NumpyGenerator) -> dict[str, Any]:
    """Return the state of a generator, with arrays."""
    if isinstance(generator, np.random.RandomState):
        return dict(generator.get_state(legacy=False))
    return dict(generator.bit_generator.state)


def begun(name: str, seed: int, *, is_legacy: bool) -> Any:
    """Return the packed state of one of numpy's bit generators, begun from a seed; None where the name is none's."""
    made = getattr(np.random, name, None)
    if not (isinstance(made, type) and issubclass(made, np.random.BitGenerator)):
        return None
    generator = np.random.RandomState(made(seed)) if is_legacy else np.random.Generator(made(seed))
    return pack(state_of(generator))


def set_state(generator: NumpyGenerator, state: dict[str, Any]) -> None:
    """Set a generator to a packed state."""
    if isinstance(generator, np.random.RandomState):
        generator.set_state(unpack(state))
    else:
        generator.bit_generator.state = unpack(state)
