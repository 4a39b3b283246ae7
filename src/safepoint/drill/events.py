"""The events that a watched run tells, parsed once.

A run writes one line of JSON for each; `safepoint.evidence` is the other end. Fields that a newer version adds are
passed over, because a drill compares two starts of one and the same version.
"""

from __future__ import annotations

import msgspec

from safepoint.errors import CorruptionError


class Began(msgspec.Struct, frozen=True, tag_field="event", tag="start"):
    """The manager of one of several ranks was made, in a process of this number."""

    process: int = 0


class Restored(msgspec.Struct, frozen=True, tag_field="event", tag="restored"):
    """`restore()` returned: the step it went back to, the promise, and the checkpoints it refused, as text."""

    step: int
    generation: str | None = None
    promise: str = "exact"
    replayed: int = 0
    refused: tuple[str, ...] = ()
    is_fresh: bool = False


class Update(msgspec.Struct, frozen=True, tag_field="event", tag="update"):
    """An update was completed: metrics as exact text, sample ids by loader, the digest of the random streams."""

    step: int
    metrics: dict[str, str] = {}
    ids: dict[str, tuple[int, ...]] = {}
    streams: str = ""


class Phase(msgspec.Struct, frozen=True, tag_field="event", tag="phase"):
    """A phase of a save begins."""

    phase: str


class Committed(msgspec.Struct, frozen=True, tag_field="event", tag="committed"):
    """A checkpoint exists."""

    step: int
    generation: str


class State(msgspec.Struct, frozen=True, tag_field="event", tag="state"):
    """The digest of each item, on request."""

    items: dict[str, str]


class Closed(msgspec.Struct, frozen=True, tag_field="event", tag="closed"):
    """The manager was closed in good order."""


class Apart(msgspec.Struct, frozen=True, tag_field="event", tag="apart"):
    """Ranks stand at different places and wait there; told of them, not by them."""

    places: str


Event = Began | Restored | Update | Phase | Committed | State | Closed | Apart
_DECODER: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def parse_event(line: bytes) -> Event:
    """Return the event that one line tells.

    Raises:
        CorruptionError: The line is none of the known events.
    """
    try:
        return _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise CorruptionError(
            "a watched run told something that is no event",
            where="events pipe",
            expected="one JSON object a line",
            found=f"{line[:200]!r}: {exc}",
            remedy="The command and the drill must use the same version of safepoint.",
        ) from exc
