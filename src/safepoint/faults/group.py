"""Messages that are lost, late, repeated or foreign, and ranks that stop or are cut off.

The faults happen to the board of one rank, below its group, so that the group's own protocol meets them.
"""

from __future__ import annotations

import enum
import fnmatch
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from safepoint.ambient import Ambient
from safepoint.errors import LeaderLostError
from safepoint.faults.chance import Chance
from safepoint.faults.script import SimulatedCrash
from safepoint.group.board import Board
from safepoint.group.signs import is_sign

_FOREIGN_BYTES = 16


class MessageEffect(enum.Enum):
    """What happens to a message or to its rank.

    ``LOSE``: the message never arrives, and its sender is not told. ``DELAY``: it arrives `seconds` later, while its
    sender goes on; it is lost if the sender does nothing more. ``REPEAT``: it arrives, and again `seconds` later.
    ``FOREIGN``: another message arrives in its place: the last one before it that the fault's globs meet, or noise.
    ``PAUSE``: the rank stops for `seconds`, then goes on as if nothing had been. ``CUT``: the rank does not reach the
    board for `seconds`. ``STOP``: the rank dies before the message is sent, ``STOP_AFTER``: after that. The board of a
    leader that dies is gone.
    """

    LOSE = "lose"
    DELAY = "delay"
    REPEAT = "repeat"
    FOREIGN = "foreign"
    PAUSE = "pause"
    CUT = "cut off"
    STOP = "stop"
    STOP_AFTER = "stop after"

    def __repr__(self) -> str:
        return f"MessageEffect.{self.name}"


OF_MESSAGES = frozenset({MessageEffect.LOSE, MessageEffect.DELAY, MessageEffect.REPEAT, MessageEffect.FOREIGN})


@dataclass(frozen=True, slots=True)
class MessageFault:
    """Say what goes wrong on one rank, and at which operation.

    An operation is a ``post``, or the first ``look`` for a key; a leader that gathers looks for ``<topic>/1`` first. A
    message's key is ``<topic>/word`` when the leader spreads, ``<topic>/<rank>`` when ranks send, ``<topic>/closed``
    when the leader ends a gathering. What happens to messages meets posts alone. A sign of life, ``alive/<rank>``, is
    no operation, and meets only faults whose key begins so.

    Args:
        effect: What happens, once.
        operation: The operation's number on this rank, counted from 0. None: any.
        verb: A glob over ``post`` and ``look``.
        key: A glob over keys; ``*`` also matches ``/``.
        occurrence: How many operations that agree are spared first.
        seconds: How long it lasts.
    """

    effect: MessageEffect
    operation: int | None = None
    verb: str = "*"
    key: str = "*"
    occurrence: int = 0
    seconds: float = 60.0

    def meets(self, number: int, verb: str, key: str) -> bool:
        """Return whether an operation agrees with this fault, whatever came before it."""
        if self.effect in OF_MESSAGES and verb != "post":
            return False
        if is_sign(key) != is_sign(self.key):
            return False
        if self.operation is not None and number != self.operation:
            return False
        return fnmatch.fnmatchcase(verb, self.verb) and fnmatch.fnmatchcase(key, self.key)

    def __str__(self) -> str:
        place = f"operation {self.operation}" if self.operation is not None else f"match {self.occurrence}"
        return f"{self.effect.value} ({self.seconds:g} s) at {place} of {self.verb!r} on {self.key!r}"


@dataclass(frozen=True, slots=True)
class MessageScript:
    """List what goes wrong on one rank; the first fault that meets an operation happens.

    The `repr` is Python that makes the same script again.
    """

    faults: tuple[MessageFault, ...] = ()
    seed: int = 0

    def __str__(self) -> str:
        return f"seed {self.seed}: " + ("; ".join(str(fault) for fault in self.faults) or "no fault")


def random_message_scripts(
    seed: int, *, world_size: int, operation_count: int, longest_s: float
) -> dict[int, MessageScript]:
    """Return scripts for one or two ranks, with one fault each; same seed, same scripts.

    Args:
        seed: The seed.
        world_size: The number of ranks.
        operation_count: A fault meets one of so many first operations of its rank.
        longest_s: The longest duration of a fault; the shortest is a hundredth of it.
    """
    chance = Chance("messages", seed)
    effects = tuple(MessageEffect)
    scripts: dict[int, MessageScript] = {}
    for _ in range(1 + chance.below(2)):
        fault = MessageFault(
            effects[chance.below(len(effects))],
            operation=chance.below(operation_count),
            seconds=longest_s * (1 + chance.below(100)) / 100,
        )
        scripts[chance.below(world_size)] = MessageScript((fault,), seed)
    return scripts


class FaultyBoard:
    """Pass calls on to the board of one rank, and let the faults of a script happen on the way.

    Args:
        inner: The rank's board.
        script: What goes wrong.
        ambient: The clock of delays and pauses.
    """

    def __init__(self, inner: Board, script: MessageScript, *, ambient: Ambient) -> None:
        self._inner = inner
        self._script = script
        self._ambient = ambient
        self._lock = threading.Lock()
        self._operations: list[tuple[int, str, str]] = []
        self._fired: list[tuple[int, MessageFault]] = []
        self._spared = [0] * len(script.faults)
        self._looked: set[str] = set()
        self._sent: list[tuple[str, bytes]] = []
        self._flying: list[tuple[float, str, bytes]] = []
        self._cut_until = float("-inf")
        self._is_stopped = False

    @property
    def operations(self) -> list[tuple[int, str, str]]:
        """Return a copy of the log: (number, verb, key) of each operation begun."""
        with self._lock:
            return list(self._operations)

    @property
    def fired(self) -> list[tuple[int, MessageFault]]:
        """Return which faults happened, each with the number of its operation."""
        with self._lock:
            return list(self._fired)

    def post(self, key: str, message: bytes, *, limit_s: float) -> None:
        """Count, and pass on what the script makes of it."""
        self._require_alive(limit_s)
        fault = self._begin("post", key)
        effect = fault.effect if fault is not None else None
        due = self._ambient.monotonic() + (fault.seconds if fault is not None else 0.0)
        if effect is MessageEffect.FOREIGN and fault is not None:
            message = self._foreign(fault, key)
        with self._lock:
            self._sent.append((key, message))
            if effect in (MessageEffect.DELAY, MessageEffect.REPEAT):
                self._flying.append((due, key, message))
        if effect not in (MessageEffect.LOSE, MessageEffect.DELAY):
            self._inner.post(key, message, limit_s=limit_s)
        if effect is MessageEffect.STOP_AFTER:
            self._stop(f"after: post {key}")

    def look(self, key: str, *, limit_s: float) -> bytes | None:
        """Count the first look for a key, and pass on."""
        self._look_for([key], limit_s)
        return self._inner.look(key, limit_s=limit_s)

    def take(self, keys: Sequence[str], *, limit_s: float) -> dict[str, bytes]:
        """Count the first look for a key, and pass on."""
        self._look_for(keys[:1], limit_s)
        return self._inner.take(keys, limit_s=limit_s)

    def remove(self, keys: Sequence[str], *, limit_s: float) -> None:
        """Pass on without counting."""
        self._require_alive(limit_s)
        self._inner.remove(keys, limit_s=limit_s)

    def close(self) -> None:
        """Pass on without counting."""
        self._inner.close()

    def _look_for(self, keys: Sequence[str], limit_s: float) -> None:
        self._require_alive(limit_s)
        for key in keys:
            with self._lock:
                is_known = key in self._looked
                self._looked.add(key)
            fault = None if is_known else self._begin("look", key)
            if fault is not None and fault.effect is MessageEffect.STOP_AFTER:
                self._stop(f"at: look {key}")

    def _begin(self, verb: str, key: str) -> MessageFault | None:
        """Count an operation, and let what concerns the rank itself happen."""
        with self._lock:
            number = len(self._operations)
            if not is_sign(key):
                self._operations.append((number, verb, key))
            fault = self._pick(number, verb, key)
            if fault is None:
                return None
            self._fired.append((number, fault))
        if fault.effect is MessageEffect.STOP:
            self._stop(f"before: {verb} {key}")
        if fault.effect is MessageEffect.PAUSE:
            self._ambient.sleep(fault.seconds)
        if fault.effect is MessageEffect.CUT:
            self._cut_until = self._ambient.monotonic() + fault.seconds
            self._require_reach()
        return fault

    def _pick(self, number: int, verb: str, key: str) -> MessageFault | None:
        chosen: MessageFault | None = None
        for index, fault in enumerate(self._script.faults):
            if not fault.meets(number, verb, key):
                continue
            if self._spared[index] == fault.occurrence and chosen is None:
                chosen = fault
            self._spared[index] += 1
        return chosen

    def _foreign(self, fault: MessageFault, key: str) -> bytes:
        with self._lock:
            earlier = [message for sent, message in self._sent if sent != key and fnmatch.fnmatchcase(sent, fault.key)]
        chance = Chance(self._script.seed, key)
        return earlier[-1] if earlier else bytes(chance.below(256) for _ in range(_FOREIGN_BYTES))

    def _require_alive(self, limit_s: float) -> None:
        if self._is_stopped:
            raise SimulatedCrash("the rank has stopped")
        self._require_reach()
        now = self._ambient.monotonic()
        with self._lock:
            due = [(key, message) for time, key, message in self._flying if time <= now]
            self._flying = [flying for flying in self._flying if flying[0] > now]
        for key, message in due:
            self._inner.post(key, message, limit_s=limit_s)

    def _require_reach(self) -> None:
        if self._ambient.monotonic() < self._cut_until:
            raise LeaderLostError("the board cannot be reached", found="a cut")

    def _stop(self, place: str) -> None:
        self._is_stopped = True
        self._inner.close()
        raise SimulatedCrash(f"stopped {place}")
