"""Publish: the one operation that makes a checkpoint exist.

Before the manifest has its name there is no checkpoint, after it there is one. An error in between is
`OutcomeUnknownError`: it is settled by reading, never by a second attempt.

Spec: C6.
"""

from __future__ import annotations

from safepoint.ambient import Ambient
from safepoint.errors import CorruptionError, FencedError, ObjectExistsError, OutcomeUnknownError, StorageError
from safepoint.format.encoding import MANIFEST_LIMIT_BYTES, check_length, seal
from safepoint.format.manifest import Manifest
from safepoint.format.names import MANIFEST, generation_path
from safepoint.joining.claim import Claim, check_not_fenced
from safepoint.storage.base import Storage


def publish(storage: Storage, manifest: Manifest, claim: Claim, *, ambient: Ambient) -> None:
    """Publish the manifest, make its name durable, read it back, and look for a newer incarnation once more.

    Raises:
        FencedError: A newer incarnation owns the run; if the manifest was published, it is off the live lineage.
        OutcomeUnknownError: The manifest may or may not be durable.
        RequestError: It is longer than a reader takes; nothing was published.
        StorageError: It was not published.

    Spec: C6, F2.5.
    """
    data = seal(manifest)
    path = generation_path(manifest.generation, MANIFEST)
    check_not_fenced(storage, claim, ambient=ambient)
    check_length(len(data), limit_bytes=MANIFEST_LIMIT_BYTES, where=path)
    try:
        storage.publish(path, data)
    except (OutcomeUnknownError, ObjectExistsError) as exc:
        # A lost answer: only what can be read back decides. A name that is taken by other bytes is not ours.
        if not _is_ours(storage, path, data):
            raise _unknown(path, exc) from exc
    try:
        storage.sync_folder(generation_path(manifest.generation))
        is_ours = _is_ours(storage, path, data)
        check_not_fenced(storage, claim, ambient=ambient)
    except FencedError:
        raise
    except (StorageError, CorruptionError) as exc:
        raise _unknown(path, exc) from exc
    if not is_ours:
        raise _unknown(path, "the manifest reads back differently")


def _is_ours(storage: Storage, path: str, data: bytes) -> bool:
    try:
        return storage.read(path, limit_bytes=MANIFEST_LIMIT_BYTES) == data
    except (StorageError, CorruptionError):
        return False


def _unknown(path: str, found: object) -> OutcomeUnknownError:
    return OutcomeUnknownError(
        "the manifest may have been published",
        where=path,
        found=found,
        remedy="The next start settles it by reading; older checkpoints are untouched.",
    )
