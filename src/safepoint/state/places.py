"""What a place in nested state is called: in messages, and in the name of the tensor that stands there.

A tensor's name is its path, each part escaped to letters, digits, ``_ . -`` and ``%``, so that no two paths meet.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_SAFE = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.-")
# What stands for itself whole, as nearly every key does.
_PLAIN = re.compile(r"[A-Za-z0-9_.-]+\Z")
_LONGEST_NAME = 400


def join(path: str, key: object) -> str:
    """Return the path of an element, as messages show it."""
    return f"{path}.{key}" if isinstance(key, str) and path else f"{path}[{key!r}]" if path else str(key)


def segment(key: object, position: int = 0) -> str:
    """Return the part of a tensor's name that stands for a key; different keys of one container never meet."""
    if type(key) is int:
        return f"[{key}]"
    if type(key) is not str:
        return f"[@{position}]"
    if _PLAIN.match(key):
        return key
    raw = key.encode("utf-8", "surrogatepass")
    return "".join(chr(byte) if byte in _SAFE else f"%{byte:02X}" for byte in raw) or "%"


def below(name: str, key: object, position: int = 0) -> str:
    """Return the name of the place of a key within a container; `position` is that of the key among its like."""
    return f"{name}/{segment(key, position)}" if name else segment(key, position)


def plain_names_below(name: str, keys: Sequence[str]) -> list[str] | None:
    """Return what tensors at the places of these keys are called; None where a key or a name does not stand as it is.

    Asking for each takes longer than all else that is done with a small tensor's name.
    """
    if not all(map(_PLAIN.match, keys)):
        return None
    names = list(map(f"{name}/".__add__, keys)) if name else list(keys)
    return names if max(map(len, names), default=0) <= _LONGEST_NAME else None


def plain_names_within(names: Sequence[str], key: str) -> list[str] | None:
    """Return what tensors under one key of each of these places are called; None as in `plain_names_below`."""
    within = [f"{name}/{key}" for name in names] if _PLAIN.match(key) else []
    return within if 0 < max(map(len, within), default=0) <= _LONGEST_NAME else None


def tensor_name(name: str, before: int) -> str:
    """Return what a tensor is called that stands at a place, as the tensor after `before` others of its tree."""
    name = name or "value"
    return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}~{before}"
