"""Manifests, and the notes beside them that hold whatever lineage is live: read back in full, and pinned.

1. A note that cannot be read notes nothing, with one exception: a pin protects as soon as its name is there.
2. Nothing here writes.

Spec: F6, C12.8.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from safepoint.errors import CorruptionError, FormatVersionError, ObjectMissingError
from safepoint.format.encoding import MANIFEST_LIMIT_BYTES, RECORD_LIMIT_BYTES, Record, check_seal, unseal
from safepoint.format.manifest import Manifest, decode_manifest
from safepoint.format.names import MANIFEST, PIN, VERIFIED, generation_path
from safepoint.format.records import PinRecord, Refusal, VerifiedRecord
from safepoint.storage.base import Storage

UNREADABLE_PIN = "its pin cannot be read"


@dataclass(frozen=True, slots=True)
class Pin:
    """Hold why a generation is pinned; `pinned` says since when, for people, and is empty where that cannot be read."""

    reason: str
    pinned: str = ""


class Manifests:
    """Read manifests, and decode one again only where its bytes are other ones."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[bytes, Manifest]] = {}

    def read(self, storage: Storage, generation: str) -> Manifest:
        """Return a generation's manifest as it stands there.

        Raises:
            ObjectMissingError: There is none.
            CorruptionError: It cannot be decoded.
            FormatVersionError: A newer format wrote it.
        """
        path = generation_path(generation, MANIFEST)
        data = storage.read(path, limit_bytes=MANIFEST_LIMIT_BYTES)
        known = self._known.get(generation)
        if known is None or known[0] != data:
            known = self._known[generation] = data, decode_manifest(data, where=path, generation=generation)
        return known[1]

    def forget_all_but(self, generations: Container[str]) -> None:
        """Let go of what was read of other generations."""
        self._known = {name: known for name, known in self._known.items() if name in generations}


def read_pin(storage: Storage, generation: str) -> Pin | None:
    """Return a generation's pin, or None where there is none.

    What lies under the name and cannot be read is a pin too: what somebody may have wanted to keep is kept.

    Raises:
        StorageError: The storage cannot answer.

    Spec: C12.8.
    """
    path = generation_path(generation, PIN)
    try:
        record = unseal(storage.read(path, limit_bytes=RECORD_LIMIT_BYTES), PinRecord, where=path)
    except ObjectMissingError:
        return None
    except (CorruptionError, FormatVersionError):
        return Pin(UNREADABLE_PIN)
    return Pin(record.reason, record.pinned) if record.generation == generation else Pin(UNREADABLE_PIN)


def read_verified(storage: Storage, generation: str) -> VerifiedRecord | None:
    """Return the note that every byte of a generation was read back, if it speaks of the manifest that stands there."""
    record = read_record(storage, generation_path(generation, VERIFIED), VerifiedRecord, [])
    if record is None or record.generation != generation:
        return None
    path = generation_path(generation, MANIFEST)
    try:
        digest = check_seal(storage.read(path, limit_bytes=MANIFEST_LIMIT_BYTES), where=path)
    except (ObjectMissingError, CorruptionError):
        return None
    return record if record.manifest == digest else None


def read_record(storage: Storage, path: str, kind: type[Record], damage: list[Refusal]) -> Record | None:
    """Return a small record, or None when it is absent or, then noted as damage, undecodable."""
    try:
        return unseal(storage.read(path, limit_bytes=RECORD_LIMIT_BYTES), kind, where=path)
    except ObjectMissingError:
        return None
    except CorruptionError as exc:
        damage.append(Refusal("", path, str(exc)))
        return None
