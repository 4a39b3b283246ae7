"""The ranks of a job during a restore: every decision is one, and an error of one rank is that of all.

1. What is read once comes from the leader; what every rank does is not done before all have done it.
2. Each exchange has a topic of its own: they are counted, and all ranks make the same ones.
3. One process exchanges nothing, and its errors stay as they were raised.
4. A rank may read for long, and is waited for while it shows signs of life; one that is frozen or gone is not.

Spec: C10.6, C11.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from safepoint.contract import Reason
from safepoint.errors import Difference
from safepoint.group.agreement import join, lead
from safepoint.group.base import Group
from safepoint.group.solo import SoloGroup

# How long a rank waits for the slowest one, which may be reading, and how long that one may show no sign of life.
DEADLINE_S = 1800.0
SILENCE_S = 60.0
# A start that is given up costs more than a save: a machine may stand still for some seconds.
SHORTEST_SILENCE_S = 30.0

Value = TypeVar("Value")
Part = TypeVar("Part")
Finding = TypeVar("Finding", Reason, Difference)


class Ranks:
    """Let the ranks of a job take the steps of restores together.

    Args:
        group: The ranks.
        topic: The beginning of all topics; used by no other object, here or on another rank.
        deadline_s: The longest wait for the slowest rank.
        silence_s: How long a rank that is waited for may show no sign of life.
    """

    def __init__(
        self,
        group: Group | None = None,
        *,
        topic: str = "restore",
        deadline_s: float = DEADLINE_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._group = group or SoloGroup()
        self._topic = topic
        self._deadline_s = deadline_s
        self._silence_s = silence_s
        self._count = 0
        self._past: list[str] = []

    @property
    def rank(self) -> int:
        """Return this process's rank."""
        return self._group.rank

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._group.world_size

    def led(self, act: Callable[[], Value], kind: type[Value]) -> Value:
        """Let the leader act, and return what it found on every rank.

        Raises:
            SafepointError: What the leader's act raised, on every rank.
        """
        if self.world_size == 1:
            return act()
        topic = self._next_topic()
        self._past.append(topic)
        with self._group.watched(silence_s=self._silence_s):
            message = lead(self._group, topic, lambda: msgspec.msgpack.encode(act()), deadline_s=self._deadline_s)
        return msgspec.msgpack.decode(message, type=kind)

    def joined(self, act: Callable[[], Value], merge: Callable[[list[Value]], Value], kind: type[Value]) -> Value:
        """Let every rank act, and return one value made of all on every rank.

        Args:
            act: What each rank does.
            merge: Makes one of the values of all ranks, in their order; called on the leader.
            kind: The type of a value.

        Raises:
            SafepointError: What the act of any rank raised, on every rank; its `where` begins with the rank.
        """
        if self.world_size == 1:
            return act()
        return self.collected(act, merge, part=kind, kind=kind)

    def collected(
        self, act: Callable[[], Part], merge: Callable[[list[Part]], Value], *, part: type[Part], kind: type[Value]
    ) -> Value:
        """Let every rank act, let the leader make something else of what all found, and return that on every rank.

        Args:
            act: What each rank does.
            merge: Makes one thing of what all ranks found, in their order; called on the leader, also of one process.
            part: The type of what a rank finds.
            kind: The type of what is made of it.

        Raises:
            SafepointError: What the act of any rank, or the merging, raised, on every rank.
        """
        if self.world_size == 1:
            return merge([act()])
        topic, past = self._next_topic(), list(self._past)
        self._past.append(topic)

        def merged(parts: list[bytes]) -> bytes:
            return msgspec.msgpack.encode(merge([msgspec.msgpack.decode(one, type=part) for one in parts]))

        def own() -> bytes:
            return msgspec.msgpack.encode(act())

        with self._group.watched(silence_s=self._silence_s):
            message = join(self._group, topic, own, merged, deadline_s=self._deadline_s)
        # Every rank has come here, so nobody reads any more what was exchanged before.
        for earlier in past:
            self._group.settle(earlier)
        self._past = [topic]
        return msgspec.msgpack.decode(message, type=kind)

    def dealt(self, act: Callable[[int], Value], kind: type[Value]) -> Value:
        """Let the leader act once for each rank, and return on each what it found for that one.

        Raises:
            SafepointError: What the leader's act raised for any rank, on every rank.
        """
        if self.world_size == 1:
            return act(0)
        values: list[Value] = []
        self.led(lambda: values.extend(map(act, range(self.world_size))), type(None))
        topic = self._next_topic()
        self._past.append(topic)
        for rank, value in enumerate(values[1:], start=1):
            self._group.spread(f"{topic}/{rank}", msgspec.msgpack.encode(value), deadline_s=self._deadline_s)
        if values:
            return values[0]
        with self._group.watched(silence_s=self._silence_s):
            message = self._group.spread(f"{topic}/{self.rank}", None, deadline_s=self._deadline_s)
        return msgspec.msgpack.decode(message, type=kind)

    def told(
        self, names: Sequence[str], own: str, act: Callable[[str], list[Value]], kind: type[list[Value]]
    ) -> list[Value]:
        """Let the leader act once for each name, and return what it found for a rank's own; nothing for no name.

        Args:
            names: All names; known on the leader.
            own: This rank's.
            act: What the leader does.
            kind: The type of what it finds.
        """
        topic = self._next_topic()
        self._past.append(topic)
        found: list[Value] = []
        for name in names:
            value = act(name)
            self._group.spread(f"{topic}/{name}", msgspec.msgpack.encode(value), deadline_s=self._deadline_s)
            found = value if name == own else found
        if self.rank == 0 or not own:
            return found
        with self._group.watched(silence_s=self._silence_s):
            message = self._group.spread(f"{topic}/{own}", None, deadline_s=self._deadline_s)
        return msgspec.msgpack.decode(message, type=kind)

    def all(self, act: Callable[[], Value]) -> Value:
        """Let every rank act, and return what this one's act returned, once all have succeeded.

        Raises:
            SafepointError: What the act of any rank raised, on every rank; its `where` begins with the rank.
        """
        values: list[Value] = []
        self.joined(lambda: values.append(act()), lambda parts: None, type(None))
        return values[0]

    def by_leader(self, act: Callable[[], Value], otherwise: Value) -> Value:
        """Let the leader act and keep what it found, which the other ranks have no use for.

        Raises:
            SafepointError: What the leader's act raised, on every rank.
        """
        return self.all(lambda: act() if self.rank == 0 else otherwise)

    def _next_topic(self) -> str:
        self._count += 1
        return f"{self._topic}/{self._count}"


def merged_findings(parts: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Return what the ranks found, each finding once; one that not every rank has names the ranks that have it."""
    holders: dict[Finding, list[int]] = {}
    for rank, found in enumerate(parts):
        for one in dict.fromkeys(found):
            holders.setdefault(one, []).append(rank)
    return [one if len(ranks) == len(parts) else _of_ranks(one, ranks) for one, ranks in holders.items()]


def merged_names(parts: Sequence[Sequence[str]]) -> list[str]:
    """Return names that any rank has, in the order in which they first come."""
    return list(dict.fromkeys(name for names in parts for name in names))


def _of_ranks(one: Finding, ranks: list[int]) -> Finding:
    listed = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    subject = f"{one.subject} (rank {listed})"
    if isinstance(one, Difference):
        return Difference(one.word, subject, one.saved, one.current)
    return Reason(one.word, one.level, subject, one.saved, one.current)
