"""The stop of a run that a signal asks for: one boundary at which all ranks make the last save, and go on no further.

1. A signal on any rank is a wish, which its own thread brings to the leader. What is done is the leader's order, which
   all ranks follow at the same boundary.
2. An order says whether the grace period leaves time for a save, judged by how long the last one took.
3. Where another rank on this host is gone, no boundary will be reached, and the grace period is over at once: so
   torchrun ends those that are left before it starts all anew.
4. `should_stop` turns true when the last save has ended. Exit code 75 means that it was committed.
"""

from __future__ import annotations

import logging
import os
import signal
import threading

import msgspec

from safepoint.ambient import Ambient, ProcessIdentity
from safepoint.errors import LeaderLostError
from safepoint.group.agreement import join
from safepoint.group.base import Group
from safepoint.signals import (
    DEFAULT_SIGNALS,
    STOPPED_EXIT_CODE,
    SignalRelay,
    Signals,
    can_listen,
    listen,
    name_of,
)

_TOPIC = "stop"
# A wish that does not get through must not keep the thread from seeing the grace period end.
_TELLING_SHARE = 0.25
_LOOK_EVERY_S = 0.5
# Whoever sees the exception that ended a training has this part of the grace period.
_OVERTAKEN_SHARE = 0.1
# What a shell adds to the number of the signal that ended a process.
_ENDED_BY_SIGNAL = 128

_log = logging.getLogger(__name__)


class Order(msgspec.Struct, frozen=True, array_like=True):
    """Tell all ranks to stop at this boundary: the signal, and whether there is time for a save."""

    number: int
    has_time: bool


class Stop:
    """Follow the signals of one manager.

    Args:
        setting: Which signals count; None for none.
        group: The ranks.
        ambient: The clock.
    """

    def __init__(self, setting: Signals | None, group: Group, ambient: Ambient) -> None:
        self.setting = setting
        self.numbers = () if setting is None else setting.numbers
        self.should_stop = self.is_saving = False
        self._group = group
        self._ambient = ambient
        self._relay: SignalRelay | None = None
        self._pid = ambient.pid()
        self._number = 0
        self._since_s = self._looked_s = ambient.monotonic()
        self._order: Order | None = None
        self._is_told = False
        self._neighbours: list[ProcessIdentity] = []
        self._is_committed = False
        self._owed: BaseException | None = None

    @property
    def grace_s(self) -> float | None:
        """Return the grace period; None where no signal counts."""
        return None if self.setting is None else self.setting.grace_s

    @property
    def is_served(self) -> bool:
        """Return whether a boundary was reached after a signal."""
        return self._order is not None

    @property
    def exit_code(self) -> int:
        """Return what the process should end with: 0, 75 after a save on a signal, else 128 and the signal's number."""
        if self._order is None or not self.should_stop:
            return 0
        return STOPPED_EXIT_CODE if self._is_committed else _ENDED_BY_SIGNAL + self._order.number

    def listen(self, *, deadline_s: float) -> None:
        """Begin to hear signals; by default not those of a manager that is made in another thread than the main one.

        Args:
            deadline_s: How long to wait for other ranks, which tell each other what their processes are.

        Raises:
            RequestError: Signals were named, and this is not the main thread.
            AbortedError: A rank was absent.
        """
        if self.setting is not None and self._group.world_size > 1:
            self._neighbours = self._find_neighbours(deadline_s)
        if self.setting is not None and (self.setting is not DEFAULT_SIGNALS or can_listen()):
            self._relay = listen(self)

    def close(self) -> None:
        """Hear no more. Idempotent.

        A signal that no boundary has followed gets its way soon: a program that goes on after an exception must not
        lose it. An interrupt asked for the end of the training alone, which has come.
        """
        relay, self._relay = self._relay, None
        if relay is None:
            return
        relay.remove(self)
        if self.setting is not None and self._order is None and self._number not in (0, signal.SIGINT):
            later = threading.Timer(self.setting.grace_s * _OVERTAKEN_SHARE, self.get_its_way)
            later.name, later.daemon = "safepoint-signals", True
            later.start()

    @property
    def is_spent(self) -> bool:
        """Return whether the last save has ended, and the grace period too."""
        elapsed_s = self._ambient.monotonic() - self._since_s
        return self.should_stop and self.setting is not None and elapsed_s > self.setting.grace_s

    def get_its_way(self) -> None:
        """Send the process anew, once, after the training's end, a signal that found no boundary any more."""
        number, self._number = self._number, 0
        if number and self._order is None and self._ambient.pid() == self._pid:
            os.kill(self._pid, number)

    def receive(self, number: int) -> None:
        """Note the first signal."""
        if not self._number:
            self._since_s = self._ambient.monotonic()
            self._number = number

    def withdraw(self, number: int) -> None:
        """Forget a signal that has got its way before a boundary."""
        if self._number == number and self._order is None:
            self._number, self._is_told = 0, False

    def spread(self) -> None:
        """Tell the leader, once; called in the relay's thread."""
        number, is_told, self._is_told = self._number, self._is_told, True
        if is_told or self._group.rank == 0 or self.setting is None:
            return
        try:
            limit_s = self.setting.grace_s * _TELLING_SHARE
            self._group.leave(_TOPIC, str(number).encode("ascii"), limit_s=limit_s)
        except LeaderLostError as exc:
            _log.warning("the leader could not be told of %s: %s", name_of(number), exc)

    def owe(self, error: BaseException) -> None:
        """Keep what the program's own handler raised."""
        self._owed = self._owed or error

    def left_s(self) -> float | None:
        """Return how long to wait before asking again; 0 or less where no boundary will be reached.

        None where no signal came, or a boundary was reached.
        """
        if not self._number or self._order is not None or self.setting is None:
            return None
        left_s = self.setting.grace_s - (self._ambient.monotonic() - self._since_s)
        if any(self._ambient.state_of(one) == "gone" for one in self._neighbours):
            _log.warning("%s: another rank's process is gone", name_of(self._number))
            return 0.0
        return min(left_s, _LOOK_EVERY_S) if self._neighbours else left_s

    def decide(self, *, needs_s: float) -> Order | None:
        """Return the order for the boundary on which all ranks stand; on the leader. None where nothing is asked.

        Args:
            needs_s: How long a save is expected to take; 0 where none has been made.

        Raises:
            LeaderLostError: The board cannot be looked at.
        """
        if self.setting is None or self._order is not None:
            return None
        now_s, number, since_s = self._ambient.monotonic(), self._number, self._since_s
        if not number and self._group.world_size > 1:
            told = self._group.find(_TOPIC, limit_s=self.setting.grace_s)
            # When it came is on another clock: at the earliest after the last look.
            number, since_s = (int(told), self._looked_s) if told else (0, 0.0)
        self._looked_s = now_s
        return Order(number, self.setting.grace_s - (now_s - since_s) > needs_s) if number else None

    def follow(self, order: Order, *, step: int, needs_s: float) -> None:
        """Take the order at its boundary, and say what comes of it."""
        self._order = order
        self.is_saving = True
        if order.has_time:
            _log.info("%s: saving step %d, then stopping", name_of(order.number), step)
            return
        _log.warning(
            "%s: step %d is not saved: a save takes %.1f s, and less is left of the grace period of %.1f s",
            name_of(order.number),
            step,
            needs_s,
            self.grace_s,
        )

    def conclude(self, *, is_committed: bool) -> None:
        """Note how the last save ended; from here on the run should stop."""
        self._is_committed = is_committed
        self.should_stop, self.is_saving = True, False

    def end(self) -> None:
        """Raise what the program's own handler raised, or end the process where that is the setting.

        Raises:
            SystemExit: With `exit_code`.
        """
        owed, self._owed = self._owed, None
        if owed is not None:
            raise owed
        if self.setting is not None and self.setting.then == "exit":
            raise SystemExit(self.exit_code)

    def _find_neighbours(self, deadline_s: float) -> list[ProcessIdentity]:
        """Return the processes of the other ranks on this host."""
        own = self._ambient.process()

        def merged(parts: list[bytes]) -> bytes:
            return msgspec.json.encode([msgspec.json.decode(part, type=ProcessIdentity) for part in parts])

        told = join(self._group, f"{_TOPIC}/ranks", lambda: msgspec.json.encode(own), merged, deadline_s=deadline_s)
        everyone = msgspec.json.decode(told, type=list[ProcessIdentity])
        return [one for one in everyone if one.host == own.host and one != own]

    def end_if_ignored(self) -> None:
        """End a loop that has gone on to another boundary in spite of `should_stop`.

        Raises:
            SystemExit: With `exit_code`.
        """
        if self.should_stop:
            _log.warning("the run should have stopped at the boundary before, and ends here")
            raise SystemExit(self.exit_code)
