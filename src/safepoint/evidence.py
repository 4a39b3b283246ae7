"""What a run shows to whoever watches it: the failure drill, or a test.

A watcher gives two named pipes in the environment. At each event the run writes one line of JSON and waits for one line
in return: ``go`` lets it continue, ``state`` asks for the digests of all items first. So a watcher can stop the run
exactly at an update or in a phase of a save, from outside, and compare two runs value by value. Without a watcher
nothing here costs anything.

Of several ranks each has a pair of pipes of its own, and tells in its first event which process it is.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from typing import IO

from safepoint.ambient import Ambient
from safepoint.errors import RequestError
from safepoint.state.item import STREAMS_ITEM, Item
from safepoint.state.snapshot import capture_item, digest_state
from safepoint.storage.url import text_of

PIPES_VARIABLE = "SAFEPOINT_WATCH"
RANK_VARIABLE = "RANK"
ROOT_VARIABLE = "SAFEPOINT_WATCH_ROOT"


class Evidence:
    """Tell what happens to the watcher, if there is one; from any thread, one event at a time.

    Args:
        pipes: Where to write events and read answers; None when nobody watches.
        items: The items whose digests a watcher may ask for.
    """

    def __init__(self, pipes: tuple[IO[bytes], IO[bytes]] | None, items: Mapping[str, Item]) -> None:
        self._pipes = pipes
        self._items = items
        self._lock = threading.Lock()

    @classmethod
    def find(cls, ambient: Ambient, items: Mapping[str, Item]) -> Evidence:
        """Return the evidence for the watcher that the environment names, or for none.

        Raises:
            RequestError: The watcher died before it could be told anything, or has no pipes for this rank.
        """
        named = ambient.variable(PIPES_VARIABLE)
        if not named:
            return cls(None, items)
        pairs = json.loads(named)
        if isinstance(pairs[0], str):
            return cls(_open(*pairs), items)
        rank = ambient.variable(RANK_VARIABLE) or ""
        if not rank.isdigit() or int(rank) >= len(pairs):
            raise RequestError(
                "the watcher that the environment names has no pipes for this process",
                where=RANK_VARIABLE,
                expected=f"a rank from 0 to {len(pairs) - 1}, as torchrun sets it",
                found=repr(rank),
            )
        evidence = cls(_open(*pairs[int(rank)]), items)
        evidence.tell("start", process=ambient.pid())
        return evidence

    @property
    def is_watched(self) -> bool:
        """Return whether anybody watches."""
        return self._pipes is not None

    def tell(self, kind: str, **facts: object) -> None:
        """Tell an event and wait for the answer; return at once when nobody watches any more."""
        if self._pipes is None:
            return
        with self._lock:
            if self._ask({"event": kind, **facts}) == b"state":
                state = {name: digest_state(capture_item(item)) for name, item in self._items.items()}
                self._ask({"event": "state", "items": state})

    def show_update(self, step: int, metrics: Mapping[str, float], ids: Mapping[str, Sequence[int]]) -> None:
        """Tell a completed update, every number as exact text and the random streams by their digest."""
        if self._pipes is None:
            return
        exact = {name: value.hex() for name, value in metrics.items()}
        streams = digest_state(capture_item(self._items[STREAMS_ITEM]))
        self.tell("update", step=step, metrics=exact, ids=ids, streams=streams)

    def _ask(self, line: Mapping[str, object]) -> bytes:
        if self._pipes is None:
            return b""
        events, answers = self._pipes
        try:
            events.write(json.dumps(line).encode("ascii") + b"\n")
            events.flush()
            return answers.readline().strip()
        except (BrokenPipeError, ValueError):
            return b""


def watched_url(url: str | os.PathLike[str], ambient: Ambient) -> str:
    """Return where a run lies: at its own URL, or in the watcher's folder under the URL's last part."""
    root = ambient.variable(ROOT_VARIABLE)
    text = text_of(url)
    return os.path.join(root, text.rstrip("/").rsplit("/", 1)[-1] or "run") if root else text


def _open(events: str, answers: str) -> tuple[IO[bytes], IO[bytes]]:
    try:
        # A watcher holds its ends open. Without the flag, a run whose watcher has died would wait here for ever.
        end = os.open(events, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as exc:
        raise RequestError(
            "the watcher that the environment names is gone",
            where=PIPES_VARIABLE,
            found=f"{events}: {exc.strerror}",
            remedy="Start the command without this variable, or through `safepoint drill`.",
        ) from exc
    os.set_blocking(end, True)
    return open(end, "wb"), open(answers, "rb")
