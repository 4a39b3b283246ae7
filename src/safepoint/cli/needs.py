"""How it is told which words a start has to permit, by what a checkpoint records of itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def permits_text(words: Iterable[str]) -> str:
    """Return the words as they are written in a contract."""
    return ", ".join(map(repr, words))


def needs_text(needs: Mapping[str, str]) -> str:
    """Return the words as they are written in a contract, each with its reason."""
    return "; ".join(f"{word!r} ({reason})" for word, reason in needs.items())
