"""A board on which the messages of all ranks but one lie already, so that one rank's work is measured alone."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Posted:
    """Hold the messages of one exchange, one after another in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, messages: Iterator[bytes]) -> None:
        """Store the messages."""
        with self._path.open("wb") as file:
            for message in messages:
                file.write(len(message).to_bytes(4, "big") + message)

    def read(self) -> list[bytes]:
        """Return the messages."""
        data, place, found = self._path.read_bytes(), 0, []
        while place < len(data):
            end = place + 4 + int.from_bytes(data[place : place + 4], "big")
            found.append(data[place + 4 : end])
            place = end
        return found


@dataclass
class PlayedBoard:
    """Be the leader's board, and count what the leader says.

    `answer` gives the messages of all ranks in the exchange of a topic.
    """

    answer: Callable[[str], list[bytes]]
    posts: int = 0
    posted_bytes: int = 0
    parts: dict[str, bytes] = field(default_factory=dict)

    def post(self, key: str, message: bytes, *, limit_s: float) -> None:
        self.posts += 1
        self.posted_bytes += len(message)
        if "/part/" in key:
            self.parts[key] = message

    def take(self, keys: Sequence[str], *, limit_s: float) -> dict[str, bytes]:
        messages = self.answer(keys[0].rpartition("/")[0])
        return {key: messages[int(key.rpartition("/")[2])] for key in keys}

    def look(self, key: str, *, limit_s: float) -> bytes | None:
        return None

    def remove(self, keys: Sequence[str], *, limit_s: float) -> None:
        pass

    def close(self) -> None:
        pass


def exponents(sizes: Sequence[int], values: Sequence[float]) -> list[float]:
    """Return how a value grows from one size to the next: 1 is in proportion."""
    pairs = zip(zip(sizes, values, strict=True), zip(sizes[1:], values[1:], strict=True), strict=False)
    return [round(math.log(after / before) / math.log(more / fewer), 2) for (fewer, before), (more, after) in pairs]


def child(script: str, *arguments: str) -> dict[str, Any]:
    """Run a part of a benchmark in a process of its own."""
    done = subprocess.run([sys.executable, script, *arguments], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)
