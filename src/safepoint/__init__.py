"""Save training runs so that they can actually resume, and prove that they do.

Public names are imported when they are first used, so that reading a run never waits for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from safepoint.errors import SafepointError as SafepointError

__version__ = "0.1.0"

# The home of each public name, by module. Type checkers read the imports above; a test keeps the two alike.
_HOMES = {
    "SafepointError": "safepoint.errors",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
