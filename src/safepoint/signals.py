"""Signals that ask a run to save and to stop, and how they arrive whatever the main thread is doing.

1. The system itself tells a thread of ours, also while the main thread is inside a call that lasts. The handler, which
   Python runs in the main thread at its next instruction, notes the signal, wakes that thread, and waits for nothing.
2. A handler that the program had installed runs too, at once. What it raises, such as an exit, waits for the save.
3. Where no boundary is reached within the grace period, the process ends as it would have without safepoint. So it
   does on a signal that comes after the last save and after the grace period.
4. All of it is of the process that installed it: a child that is forked off finds every signal as it was before.
5. One relay serves all managers of a process. It is found in the interpreter's own table of handlers.
6. A signal that is ignored stays so, and a handler that was not installed from Python stays in its place.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import os
import select
import signal
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, Literal, Protocol

from safepoint.errors import RequestError

# What ends a process that has stopped on a signal after a save: BSD's EX_TEMPFAIL, "try again later".
STOPPED_EXIT_CODE = 75

_CATCHABLE = ("TERM", "USR1", "USR2", "INT", "HUP", "QUIT", "XCPU")
_READ_BYTES = 4096
# On the line to the thread: no signal has this number, and no signal that is waited with is as large as those.
_END = b"\0"
_NUMBERS, _BY_HANDLER, _TAKEN_BACK = 63, 128, 192

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Signals:
    """State which signals ask for a save and an end, and how long that may take.

    Raises:
        RequestError: A signal cannot be waited with, or a value is wrong.
    """

    names: tuple[str, ...] = ("TERM", "USR1")
    grace_s: float = 30.0
    then: Literal["stop", "exit"] = "stop"

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in _CATCHABLE:
                raise _wrong("signals", f"one or more of {', '.join(_CATCHABLE)}", name)
        if not self.names:
            raise _wrong("signals", "one or more; signals=None leaves all alone", ())
        if isinstance(self.grace_s, bool) or not isinstance(self.grace_s, int | float) or not self.grace_s > 0:
            raise _wrong("grace_s", "seconds, more than 0", self.grace_s)
        if self.then not in ("stop", "exit"):
            raise _wrong("then", "'stop' or 'exit'", self.then)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the numbers of the signals on this system."""
        return tuple(int(signal.Signals[f"SIG{name}"]) for name in self.names)


DEFAULT_SIGNALS = Signals()


def on_signals(*names: str, grace_s: float = 30.0, then: Literal["stop", "exit"] = "stop") -> Signals:
    """Return a setting for `CheckpointManager(signals=...)`: save at the next boundary after a signal, then stop.

    Args:
        names: Such as ``"TERM"`` or ``"SIGTERM"``; TERM and USR1 where none is given. With ``"INT"``, the first Ctrl-C
            asks, and the second one interrupts as ever.
        grace_s: Seconds from the signal to the end that whoever sends it leaves: the last save has to fit in.
        then: ``"stop"`` turns `manager.should_stop` true, and ends a loop that goes on in spite of it at its next
            boundary; ``"exit"`` ends the process directly after the save. Both with exit code 75.

    Raises:
        RequestError: A signal cannot be waited with, or a value is wrong.
    """
    short = tuple(dict.fromkeys(str(name).removeprefix("SIG") for name in names))
    return Signals(short or DEFAULT_SIGNALS.names, grace_s, then)


def name_of(number: int) -> str:
    """Return a signal's name, such as ``SIGTERM``."""
    return signal.Signals(number).name


class Listener(Protocol):
    """Be told of signals. All but `spread` may be called between any two instructions of the main thread."""

    numbers: tuple[int, ...]

    def receive(self, number: int) -> None:
        """Note a signal, without waiting; called several times for one, in the relay's thread and in the main one."""

    def spread(self) -> None:
        """Tell whoever else has to know, once; called in the relay's thread."""

    def withdraw(self, number: int) -> None:
        """Forget a signal that has got its way before a boundary; called in the main thread, and in the relay's."""

    def owe(self, error: BaseException) -> None:
        """Keep what the program's own handler raised, to raise it when there is nothing more to wait for."""

    def left_s(self) -> float | None:
        """Return how long to wait before asking again; 0 or less where no boundary will be reached.

        None where no signal came, or a boundary was reached.
        """

    @property
    def is_served(self) -> bool:
        """Return whether a boundary was reached after a signal."""

    @property
    def is_saving(self) -> bool:
        """Return whether the last save is at work."""

    @property
    def is_spent(self) -> bool:
        """Return whether the last save has ended, and the grace period too."""


class SignalRelay:
    """Stand between the signals of a process and the managers in it; an instance is itself the handler."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        # Any: a handler is a number, a function, or None where it is not one of Python's.
        self._previous: dict[int, Any] = {}
        self._listeners: list[weakref.ref[Listener]] = []
        self._interrupted: set[int] = set()
        self._passing: dict[int, FrameType | None] = {}
        self._is_over = False
        self.has_ended = False
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # As files, which once closed refuse a number that may be another file's by then.
        self._reader, self._writer = io.FileIO(reader, "r"), io.FileIO(writer, "w")
        os.register_at_fork(after_in_child=partial(_disarm, weakref.ref(self)))
        threading.Thread(target=self._serve, name="safepoint-signals", daemon=True).start()
        self._hold_wakeup()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Tell the thread, and run the handler that the program had."""
        outer = self._passing.get(number)
        if outer is not None and (frame is None or frame is outer):
            # The program's handler calls the one that it found, and that was this one; a new signal has a new frame.
            return
        self._passing[number] = frame
        try:
            self._relay(number, frame)
        finally:
            self._passing[number] = outer

    def add(self, listener: Listener) -> None:
        """Begin to tell a listener; in the main thread."""
        for number in listener.numbers:
            if signal.getsignal(number) is not self:
                self._install(number)
        self._listeners.append(weakref.ref(listener, partial(_tidy, weakref.ref(self))))

    def remove(self, listener: Listener | None = None) -> None:
        """Tell a listener, and those that are gone, no more; after the last one, put back what was. Idempotent."""
        self._listeners = [ref for ref in self._listeners if ref() not in (None, listener)]
        is_own = os.getpid() == self._pid and threading.current_thread() is threading.main_thread()
        if self._listeners or not is_own or self.has_ended:
            # From another thread nothing can be put back: what still arrives is passed on.
            return
        self.has_ended = True
        self._restore()
        self._tell(_END)

    def forget(self) -> None:
        """Put back, in a child that was forked off, what was installed before the relay."""
        self._restore()
        self._reader.close()
        self._writer.close()

    def _relay(self, number: int, frame: FrameType | None) -> None:
        listeners = list(self._listening(number))
        if os.getpid() != self._pid or self._is_over or not listeners:
            self._pass_on(number, frame)
            return
        for listener in listeners:
            listener.receive(number)
        self._tell(bytes([_BY_HANDLER + number]))
        previous = self._previous[number]
        if previous is signal.default_int_handler:
            self._interrupt(number, frame, listeners)
        elif callable(previous):
            try:
                previous(number, frame)
            except BaseException as exc:  # noqa: BLE001 (raised after the save)
                for one in listeners:
                    one.owe(exc)

    def _install(self, number: int) -> None:
        previous = signal.getsignal(number)
        is_foreign = previous is None or (previous is signal.SIG_DFL and _is_caught(number))
        if previous is signal.SIG_IGN or is_foreign:
            why = "has a handler that is not Python's" if is_foreign else "is ignored"
            _log.info("%s %s, and is left as it is", name_of(number), why)
            return
        self._previous[number] = previous
        signal.signal(number, self)

    def _interrupt(self, number: int, frame: FrameType | None, listeners: Sequence[Listener]) -> None:
        """Ask at the first interrupt; the next one interrupts and takes that back, so that a prompt can ask anew."""
        if number not in self._interrupted and not any(one.is_served for one in listeners):
            self._interrupted.add(number)
        elif not any(one.is_saving for one in listeners):
            self._interrupted.discard(number)
            for listener in listeners:
                listener.withdraw(number)
            # The thread may have yet to hear of both.
            self._tell(bytes([_TAKEN_BACK + number]))
            signal.default_int_handler(number, frame)

    def _restore(self) -> None:
        for number, previous in self._previous.items():
            if signal.getsignal(number) is self:
                signal.signal(number, previous)
        held = signal.set_wakeup_fd(-1)
        if held != self._writer.fileno():
            signal.set_wakeup_fd(held)

    def _hold_wakeup(self) -> None:
        held = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if held != -1:
            # An event loop's: it goes on with it, and the handler alone tells the thread.
            signal.set_wakeup_fd(held)

    def _listening(self, number: int) -> Iterator[Listener]:
        for ref in self._listeners:
            listener = ref()
            if listener is not None and number in listener.numbers:
                yield listener

    def _tell(self, message: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._writer.write(message)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous.get(number, signal.SIG_DFL)
        if callable(previous):
            previous(number, frame)
        elif previous is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _serve(self) -> None:
        """Be the thread: hand signals over, and see that the grace period ends."""
        wait_s: float | None = None
        latest = 0
        while True:
            for number in self._arrived(wait_s):
                if number == _END[0]:
                    self._reader.close()
                    self._writer.close()
                    return
                latest = self._hand_over(number) or latest
            wait_s = self._left_s()
            if wait_s is not None and wait_s <= 0:
                self._let_go(latest, "no boundary was reached in time, and nothing is saved")
                wait_s = None

    def _hand_over(self, byte: int) -> int:
        """Tell the listeners of a signal, and return its number; 0 where it is not ours.

        The system writes of every signal that Python handles, also of one for which the program has installed another
        handler since.
        """
        number = byte & _NUMBERS
        if not number or (byte < _BY_HANDLER and signal.getsignal(number) is not self):
            return 0
        listeners = list(self._listening(number))
        for listener in listeners:
            if byte >= _TAKEN_BACK:
                listener.withdraw(number)
                continue
            listener.receive(number)
            listener.spread()
        is_interrupt = self._previous.get(number) is signal.default_int_handler
        if listeners and not is_interrupt and not self._is_over and all(one.is_spent for one in listeners):
            self._let_go(number, "the last save and the grace period have ended")
        return number if listeners else 0

    def _arrived(self, wait_s: float | None) -> bytes:
        line = select.poll()
        line.register(self._reader, select.POLLIN)
        is_there = line.poll(None if wait_s is None else 1000 * max(0.0, wait_s))
        return self._reader.read(_READ_BYTES) or _END if is_there else b""

    def _left_s(self) -> float | None:
        """Return how long to wait before the process has to end; None where it has not."""
        listeners = [one for ref in self._listeners if (one := ref()) is not None]
        left = [one.left_s() for one in listeners]
        if self._is_over or any(one.is_served for one in listeners):
            return None
        return max((one for one in left if one is not None), default=None)

    def _let_go(self, number: int, why: str) -> None:
        """End the process as without safepoint."""
        self._is_over = True
        _log.warning("%s: %s", name_of(number), why)
        if self._previous[number] is signal.SIG_DFL:
            # Python lets only the main thread put a disposition back, and that one does not come to it.
            put_back = ctypes.CDLL(None).signal
            put_back.argtypes, put_back.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
            put_back(number, None)
        os.kill(self._pid, number)


def listen(listener: Listener) -> SignalRelay:
    """Let a listener hear its signals; in the main thread.

    Raises:
        RequestError: This is not the main thread: Python installs handlers from there alone.
    """
    if not can_listen():
        raise RequestError(
            "signals can be listened to from the main thread only",
            found=threading.current_thread().name,
            remedy="Make the manager in the main thread, or pass signals=None.",
        )
    relay = _installed(listener.numbers) or SignalRelay()
    relay.add(listener)
    return relay


def can_listen() -> bool:
    """Return whether this thread may install handlers."""
    return threading.current_thread() is threading.main_thread()


def _installed(numbers: Sequence[int]) -> SignalRelay | None:
    for number in numbers:
        found = signal.getsignal(number)
        if isinstance(found, SignalRelay) and not found.has_ended:
            return found
    return None


def _tidy(relay: weakref.ref[SignalRelay], _: weakref.ref[Listener]) -> None:
    found = relay()
    if found is not None:
        found.remove()


def _disarm(ref: weakref.ref[SignalRelay]) -> None:
    relay = ref()
    if relay is not None:
        relay.forget()


def _is_caught(number: int) -> bool:
    """Return whether the process has a handler for a signal, whoever installed it; False where nothing tells."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="utf-8", errors="replace") as file:
        masks = [line.split()[1] for line in file if line.startswith("SigCgt:")]
        return bool(masks) and bool(int(masks[0], 16) >> (number - 1) & 1)
    return False


def _wrong(name: str, expected: str, found: object) -> RequestError:
    text = f"{type(found).__name__} {found!r:.80}"
    return RequestError("a setting for signals is wrong", where=name, expected=expected, found=text)
