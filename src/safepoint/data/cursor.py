"""A position in an input that safepoint does not order itself: a queue, a log, a file, a stream of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

from safepoint.data.order import check_number
from safepoint.errors import Difference, FormatVersionError, MismatchError, RequestError

ReplayKind = Literal["exact", "may_repeat", "may_skip"]

_KINDS: tuple[ReplayKind, ...] = ("exact", "may_repeat", "may_skip")
_RECORD_VERSION = 1
_FIELDS = ("version", "name", "offset", "ahead", "replay", "replay_count")
_LARGEST = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Replay:
    """Declare what the source gives after a seek to a saved offset.

    ``exact``: the very inputs that would have come next. ``may_repeat``: up to `count` inputs from before the offset
    come once more. ``may_skip``: up to `count` inputs after it never come. `count` is in the unit of the offset.

    Raises:
        RequestError: The kind is not one of these, or the count does not fit it.
    """

    kind: ReplayKind = "exact"
    count: int = 0

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise RequestError(
                "a replay policy has a kind that does not exist", expected=" or ".join(_KINDS), found=repr(self.kind)
            )
        check_number(f"the count of {self.kind}", self.count, *((0, 0) if self.kind == "exact" else (1, _LARGEST)))

    @property
    def level(self) -> Literal["exact", "approximate"]:
        """Return the highest level of continuation that an input with this policy can keep."""
        return "exact" if self.kind == "exact" else "approximate"

    @property
    def reason(self) -> str:
        """Return why the level is not ``exact``; empty if it is."""
        if self.kind == "exact":
            return ""
        what = "come twice" if self.kind == "may_repeat" else "be left out"
        return f"up to {self.count} of the external inputs may {what} at each resume, as declared"

    def __str__(self) -> str:
        return self.kind if self.kind == "exact" else f"{self.kind}({self.count})"


def may_repeat(count: int) -> Replay:
    """Declare that up to `count` inputs may come a second time after a resume."""
    return Replay("may_repeat", count)


def may_skip(count: int) -> Replay:
    """Declare that up to `count` inputs may never come after a resume."""
    return Replay("may_skip", count)


class Cursor:
    """Count what was taken from an external input, and seek to that count at a restore.

    The offset is a number in a unit of the user's choice (messages, bytes, tokens) that says where the source goes on;
    what a reader fetched ahead and did not hand to training is not counted by `advance`.

    Args:
        offset: Where the source stands.
        seek: Called with the offset at each `load_state_dict`, so that the source goes on there; also the place to
            throw away what was read ahead.
        replay: What the source gives after a seek: ``"exact"`` or a `Replay`, such as ``may_repeat(64)``.
        name: Name of the source, compared at a restore.

    Raises:
        RequestError: The offset or the policy is not one that can be used.
    """

    def __init__(
        self,
        offset: int = 0,
        *,
        seek: Callable[[int], object] | None = None,
        replay: Replay | Literal["exact"] = "exact",
        name: str | None = None,
    ) -> None:
        check_number("offset", offset, 0, _LARGEST)
        self._offset = self._committed = offset
        self._uses_commit = False
        self._seek = seek
        self._name = name
        self.replay = replay if isinstance(replay, Replay) else Replay(replay)

    @property
    def offset(self) -> int:
        """Return the offset of the next input to be taken."""
        return self._offset

    @property
    def uncommitted(self) -> int:
        """Return how far the offset is beyond the last commit."""
        return self._offset - self._committed

    def advance(self, n: int = 1) -> None:
        """Count `n` more units as handed to training.

        Raises:
            RequestError: `n` is negative or no int.
        """
        check_number("n", n, 0, _LARGEST - self._offset)
        self._offset += n

    def commit(self, n: int | None = None) -> None:
        """Count units as finished with: their update is complete.

        Args:
            n: How many more units; None for all that were handed to training.

        Raises:
            RequestError: There are more than were handed to training.
        """
        if n is None:
            n = self.uncommitted
        check_number("n", n, 0, self.uncommitted)
        self._uses_commit = True
        self._committed += n

    def differences(self, state: Mapping[str, object]) -> list[Difference]:
        """Return every difference between a saved state's source and this one; changes nothing.

        Raises:
            FormatVersionError: A newer version of safepoint wrote the state.
            MismatchError: The state is not one of a cursor.
        """
        saved = _parse(state)
        sides = [("dataset", "name of the source", saved.name, self._name)]
        sides.append(("dataset.replay", "replay policy of the source", str(saved.replay), str(self.replay)))
        return [Difference(word, subject, str(was), str(is_)) for word, subject, was, is_ in sides if was != is_]

    def state_dict(self) -> dict[str, object]:
        """Return the offset (the committed one once `commit` was called) and the policy, as plain values."""
        return {
            "version": _RECORD_VERSION,
            "name": self._name,
            "offset": self._committed if self._uses_commit else self._offset,
            "ahead": self.uncommitted if self._uses_commit else 0,
            "replay": self.replay.kind,
            "replay_count": self.replay.count,
        }

    def load_state_dict(self, state: Mapping[str, object], *, permit: frozenset[str] = frozenset()) -> None:
        """Seek to a saved offset. What `seek` raises is passed on, with this cursor unchanged.

        Raises:
            FormatVersionError: A newer version of safepoint wrote the state.
            MismatchError: The state is of another source, and ``dataset`` is not permitted; nothing was changed.
        """
        saved = _parse(state)
        refused = [one for one in self.differences(state) if one.word not in permit | {"dataset.replay"}]
        if refused:
            raise MismatchError(
                "the source is not the one of the checkpoint",
                where=self._name or "",
                differences=refused,
                remedy="Use the source of the saved run, or permit the word 'dataset'.",
            )
        if self._seek is not None:
            self._seek(saved.offset)
        self._offset = self._committed = saved.offset


@dataclass(frozen=True, slots=True)
class _SavedCursor:
    name: str | None
    offset: int
    replay: Replay


def _parse(state: object) -> _SavedCursor:
    fields = state if isinstance(state, Mapping) else {}
    version = fields.get("version")
    if type(version) is int and version > _RECORD_VERSION:
        raise FormatVersionError(
            "the offset of a source was recorded by a newer version of safepoint",
            expected=f"version {_RECORD_VERSION} or older",
            found=version,
            remedy="Upgrade safepoint.",
        )
    is_version = type(version) is int and version == _RECORD_VERSION
    name, offset, ahead = fields.get("name"), fields.get("offset"), fields.get("ahead")
    kind, count = fields.get("replay"), fields.get("replay_count")
    is_whole = all(type(one) is int and 0 <= one <= _LARGEST for one in (offset, ahead, count))
    is_named = name is None or isinstance(name, str)
    is_policy = kind in _KINDS and (count == 0) == (kind == "exact")
    if not (set(fields) == set(_FIELDS) and is_version and is_whole and is_named and is_policy):
        raise MismatchError(
            "the state is not one of a cursor",
            expected=", ".join(_FIELDS),
            found=f"{state!r}"[:200],
            remedy="Restore it into the kind of object that saved it.",
        )
    # The types were seen to be right just above; mypy cannot follow them through the flags.
    return _SavedCursor(cast("str | None", name), cast(int, offset), Replay(cast(ReplayKind, kind), cast(int, count)))
