"""Decisions that all ranks take alike: all go on with the same bytes, or all raise the same error.

An error travels with its class and its facts; what it expected and found arrives as text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from safepoint.errors import AbortedError, Difference, InternalError, SafepointError, StorageError
from safepoint.group.base import Group

_VALUE = b"v"
_ERROR = b"e"


def lead(group: Group, topic: str, act: Callable[[], bytes], *, deadline_s: float) -> bytes:
    """Let the leader act, and return its bytes on every rank.

    Raises:
        SafepointError: What the leader's act raised, on every rank.
        AbortedError: The act raised something else.
        LeaderLostError: The leader's word did not come.
    """
    if group.rank != 0:
        return _opened(group.spread(topic, None, deadline_s=deadline_s), where=topic)
    outcome = _outcome(act, 0)
    group.spread(topic, _closed(outcome), deadline_s=deadline_s)
    if isinstance(outcome, SafepointError):
        raise outcome
    return outcome


def join(
    group: Group, topic: str, act: Callable[[], bytes], merge: Callable[[list[bytes]], bytes], *, deadline_s: float
) -> bytes:
    """Let every rank act, let the leader make one of their bytes, and return that on every rank.

    An error of any rank is raised on all of them; of several, that of the lowest rank.

    Args:
        group: The ranks.
        topic: The exchange's topic.
        act: Gives this rank's part.
        merge: Makes one of all parts, which come in the order of ranks; called on the leader.
        deadline_s: The longest wait for the slowest rank, and again for the leader's word.

    Raises:
        SafepointError: What a rank's act, or the merging, raised; its `where` begins with the rank.
        AbortedError: It raised something else, or a rank was absent.
        LeaderLostError: The leader's word did not come.
    """
    outcome = _outcome(act, group.rank)
    parts = group.gather(f"{topic}/parts", _closed(outcome), deadline_s=deadline_s)

    def merged() -> bytes:
        return merge([_opened(part, where=topic, rank=rank) for rank, part in enumerate(parts or [])])

    try:
        return lead(group, f"{topic}/whole", merged, deadline_s=deadline_s)
    except SafepointError as exc:
        if isinstance(outcome, SafepointError) and exc.__cause__ is None:
            # What went wrong here, with its traceback, is lost on the way over the leader.
            exc.__cause__ = outcome
        raise


def encode_error(error: SafepointError) -> bytes:
    """Return an error as bytes."""
    return msgspec.json.encode(
        _Told(
            code=error.code,
            message=_text(error.message),
            where=_text(error.where),
            expected=None if error.expected is None else _text(error.expected),
            found=None if error.found is None else _text(error.found),
            remedy=_text(error.remedy),
            differences=tuple(
                (_text(one.word), _text(one.subject), _text(one.saved), _text(one.current)) for one in error.differences
            ),
            errno=error.errno if isinstance(error, StorageError) else None,
            is_retryable=error.retryable if isinstance(error, StorageError) else False,
        )
    )


def decode_error(message: bytes, *, where: str) -> SafepointError:
    """Return the error that `encode_error` was given, with what it expected and found as text.

    Bytes that are no error give an `InternalError` about `where`.
    """
    try:
        told = msgspec.json.decode(message, type=_Told)
    except msgspec.DecodeError as exc:
        return InternalError("an error of another rank cannot be decoded", where=where, found=str(exc))
    return _made(told)


class _Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hold the facts of an error on their way."""

    code: str
    message: str
    where: str
    expected: str | None
    found: str | None
    remedy: str
    differences: tuple[tuple[str, str, str, str], ...]
    errno: int | None
    is_retryable: bool


def _outcome(act: Callable[[], bytes], rank: int) -> bytes | SafepointError:
    try:
        return act()
    except SafepointError as exc:
        return exc
    except Exception as exc:  # noqa: BLE001 (handed to the other ranks, which would wait for this one in vain, and raised)
        error = AbortedError("a rank failed", where=f"rank {rank}", found=f"{type(exc).__name__}: {exc}")
        error.__cause__ = exc
        return error


def _closed(outcome: bytes | SafepointError) -> bytes:
    return _ERROR + encode_error(outcome) if isinstance(outcome, SafepointError) else _VALUE + outcome


def _opened(message: bytes, *, where: str, rank: int | None = None) -> bytes:
    kind, content = message[:1], message[1:]
    if kind == _VALUE:
        return content
    if kind != _ERROR:
        raise InternalError("a message of another rank is neither a value nor an error", where=where, found=kind)
    error = decode_error(content, where=where)
    raise error if rank is None else _of_rank(error, rank)


def _of_rank(error: SafepointError, rank: int) -> SafepointError:
    """Return the error with the rank at fault before its place."""
    name = f"rank {rank}"
    if error.where.startswith(name):
        return error
    told = msgspec.json.decode(encode_error(error), type=_Told)
    return _made(msgspec.structs.replace(told, where=f"{name}: {error.where}" if error.where else name))


def _made(told: _Told) -> SafepointError:
    error_class = next((one for one in _classes(SafepointError) if one.code == told.code), AbortedError)
    if issubclass(error_class, StorageError):
        return error_class(
            told.message,
            where=told.where,
            expected=told.expected,
            found=told.found,
            remedy=told.remedy,
            errno=told.errno,
            retryable=told.is_retryable,
        )
    return error_class(
        told.message,
        where=told.where,
        expected=told.expected,
        found=told.found,
        remedy=told.remedy,
        differences=[Difference(*one) for one in told.differences],
    )


def _text(value: object) -> str:
    # A path that is not Unicode holds surrogates, which JSON refuses.
    return str(value).encode("utf-8", "backslashreplace").decode("utf-8")


def _classes(root: type[SafepointError]) -> Iterator[type[SafepointError]]:
    yield root
    for below in root.__subclasses__():
        yield from _classes(below)
