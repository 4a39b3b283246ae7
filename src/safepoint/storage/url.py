"""From what a user types to a storage."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from urllib.parse import unquote, urlsplit

from safepoint.ambient import Ambient, SystemAmbient
from safepoint.errors import ObjectMissingError, RequestError
from safepoint.storage.base import Storage
from safepoint.storage.local import LocalStorage
from safepoint.storage.memory import MemoryStorage
from safepoint.storage.patient import PatientStorage

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SQUEEZED_SCHEME = re.compile(r"(file|memory|s3|gs|az):/(?!/)")
_OBJECT_STORES = frozenset({"s3", "gs", "az"})


def open_storage(url: str | os.PathLike[str], *, ambient: Ambient | None = None) -> Storage:
    """Return the storage that a path or URL names; looks at nothing and creates nothing.

    A plain path or ``file:///absolute/path`` is a folder, in which what may be tried again after a passing failure is
    tried again. ``memory://`` is a fresh, empty storage at each call: no two calls share one. ``s3://``, ``gs://`` and
    ``az://`` are a `RequestError` in this version.
    """
    text = text_of(url)
    if _SQUEEZED_SCHEME.match(text):
        raise RequestError("a URL lost a slash, as pathlib does to it", where=text, remedy="Pass the URL as a string.")
    match = _SCHEME.match(text)
    if match is None:
        return _folder(_without_tilde(text), ambient)
    scheme = match.group(1).lower()
    if scheme == "file":
        return _folder(_path_of(text), ambient)
    if scheme == "memory":
        return MemoryStorage(text)
    if scheme in _OBJECT_STORES:
        raise RequestError(
            "object stores are not supported",
            where=text,
            expected="a path, file:// or memory://",
            remedy="Save to a local or mounted folder.",
        )
    raise RequestError(
        "a URL has a scheme that is not known",
        where=text,
        expected="a path, file:// or memory://",
        found=f"{scheme}://",
    )


def text_of(url: object) -> str:
    """Return a path or URL as text.

    Raises:
        RequestError: It is none.
    """
    text = os.fspath(url) if isinstance(url, str | os.PathLike) else ""
    if not isinstance(text, str) or not text or "\0" in text:
        raise RequestError("a run has no usable path", where=repr(url), expected="a path or a URL as text")
    return text


def parse_source(text: str, *, is_asked: Callable[[str], bool]) -> tuple[str, str | None]:
    """Split ``RUN@STEP`` into the run and what is asked for of it; the latter is None where there is none.

    Only what `is_asked` knows after the last ``@`` is a step, so that a path may hold an ``@`` itself; a run whose name
    ends in one and digits can be written with a slash at its end. `open_source` looks which one is there.
    """
    run, sign, step = text.rpartition("@")
    if not sign or not is_asked(step):
        return text, None
    if not run:
        raise RequestError("a step is given without its run", where=text, expected="RUN@STEP")
    return run, step


def open_source(text: str, *, record: str, is_asked: Callable[[str], bool]) -> tuple[str, Storage, str | None]:
    """Return the run that ``RUN`` or ``RUN@STEP`` names, opened, and what is asked for of it.

    A run whose own name ends in ``@`` and digits is meant before a step of another one.

    Args:
        text: What was typed.
        record: The object by which a run is known.
        is_asked: Returns whether a text is a step or another name of a checkpoint.

    Raises:
        RequestError: Either may be meant, or the text is not usable.
    """
    url, step = parse_source(text, is_asked=is_asked)
    storage = open_storage(url)
    whole = storage if step is None else open_storage(text)
    if step is None or not _holds(whole, record):
        return url, storage, step
    if _holds(storage, record):
        raise RequestError(
            "there is a run of this name, and another one that may have this step",
            where=text,
            remedy=f"Write {text}/ for the run of this name, or {url}/@{step} for the step of the other one.",
        )
    return text, whole, None


def _folder(path: str, ambient: Ambient | None) -> Storage:
    ambient = ambient or SystemAmbient()
    return PatientStorage(LocalStorage(path, ambient=ambient), ambient)


def _holds(storage: Storage, record: str) -> bool:
    if not storage.root_exists():
        return False
    try:
        storage.size(record)
    except ObjectMissingError:
        return False
    return True


def _without_tilde(path: str) -> str:
    # Only a shell expands it. Taken literally it would be a folder called "~" in the working folder, and a resumed
    # run that does not find its checkpoints.
    if path.startswith("~"):
        raise RequestError("a path begins with '~', which only a shell expands", where=path, remedy="Expand it first.")
    return path


def _path_of(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError as exc:
        raise _unusable(url) from exc
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.query or parts.fragment:
        raise _unusable(url)
    path = unquote(parts.path, errors="surrogateescape")
    if "\0" in path:
        raise RequestError("a file URL holds a NUL character", where=url)
    return path


def _unusable(url: str) -> RequestError:
    return RequestError(
        "a file URL is not usable",
        where=url,
        expected="file:///absolute/path, with '?' and '#' written as %3F and %23",
    )
