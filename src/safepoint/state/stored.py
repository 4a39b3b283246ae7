"""Reading plain trees that come from a checkpoint: which fields they have, of which types.

A sealed tree was written by somebody, which is no proof that it says what a capture says. Each item parses the tree it
is given through these functions before it compares anything, so that a wrong tree is damage, named by its item, and is
found while nothing live has been touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from safepoint.errors import CorruptionError
from safepoint.format.plain import Shared


def field(holder: Any, key: str, kind: type | tuple[type, ...], *, item: str) -> Any:
    """Return one field of a stored mapping, which has exactly this type or one of these.

    Raises:
        CorruptionError: It is absent, or of another type.
    """
    value = holder.get(key) if isinstance(holder, dict) else None
    value = value.value if isinstance(value, Shared) else value
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if type(value) not in kinds:
        raise malformed(f"{item}: {key}", " or ".join(one.__name__ for one in kinds), type(value).__name__)
    return value


def record(holder: Any, kinds: Mapping[str, type | tuple[type, ...]], *, item: str) -> dict[str, Any]:
    """Return the fields of a stored mapping that has exactly these keys, in this order.

    Raises:
        CorruptionError: A key is absent, foreign or out of order, or a value of another type.
    """
    keys = list(holder) if type(holder) is dict else type(holder).__name__
    if keys != list(kinds):
        raise malformed(item, f"the fields {', '.join(kinds)}", str(keys)[:120])
    return {key: field(holder, key, kind, item=item) for key, kind in kinds.items()}


def elements(values: list[Any], kind: type, *, item: str) -> list[Any]:
    """Return a stored list whose elements are all of one type.

    Raises:
        CorruptionError: One is not.
    """
    for value in values:
        if type(value) is not kind:
            raise malformed(item, f"a list of {kind.__name__}", type(value).__name__)
    return values


@contextmanager
def reading(item: str) -> Iterator[None]:
    """Report what the libraries below raise for a value they cannot take as damage of a stored item.

    Only around code whose sole untrusted input is the tree, and that touches nothing live.
    """
    try:
        yield
    except (TypeError, KeyError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError) as exc:
        if isinstance(exc, CorruptionError):
            raise
        raise malformed(item, "a value that a capture can have made", f"{type(exc).__name__}: {exc}"[:160]) from exc


def malformed(where: str, expected: str, found: str) -> CorruptionError:
    """Return the error of a stored item that no capture makes."""
    return CorruptionError("a stored item is malformed", where=where, expected=expected, found=found)
