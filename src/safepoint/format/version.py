"""The format's version and its feature flags. The format's version is not the package's.

Spec: F1.
"""

from __future__ import annotations

from collections.abc import Iterable

from safepoint.errors import CorruptionError, FormatVersionError

FORMAT_VERSION = 1
KNOWN_FLAGS: frozenset[str] = frozenset()


def check_version(version: int, flags: Iterable[str], *, where: str) -> None:
    """Raise `FormatVersionError` when a record needs a reader newer than this one.

    Raises:
        CorruptionError: There never was such a version.

    Spec: F1.
    """
    if version < 1:
        raise CorruptionError(
            "a record has an impossible format version", where=where, expected="1 or more", found=version
        )
    unknown = sorted(set(flags) - KNOWN_FLAGS)
    if version > FORMAT_VERSION or unknown:
        raise FormatVersionError(
            "a record was written by a newer format",
            where=where,
            expected=f"format version up to {FORMAT_VERSION}, flags {sorted(KNOWN_FLAGS)}",
            found=f"version {version}" + (f", unknown flags {str(unknown)[:200]}" if unknown else ""),
            remedy="Upgrade safepoint to read it.",
        )
