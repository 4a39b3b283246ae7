"""The ranks of a job as threads of one process, with one clock that skips what nobody works in.

Their group is the product's own `BoardGroup`; only the board and the clock are played.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from safepoint.ambient import Ambient, ProcessIdentity, ProcessState
from safepoint.errors import LeaderLostError
from safepoint.faults.group import FaultyBoard, MessageScript
from safepoint.faults.script import SimulatedCrash
from safepoint.group.base import Group
from safepoint.group.board_group import GRACE_S, BoardGroup
from safepoint.testing.ambient import FakeAmbient, FakeWorld

_GUARD_S = 60.0
_TICK_S = 0.02
# The names of the library's own threads that go by the clock.
_BY_THE_CLOCK = frozenset({"safepoint-alive", "safepoint-save"})

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class RankThread:
    """Hold what the thread of one rank is given. `board` tells which faults happened."""

    rank: int
    group: Group
    ambient: Ambient
    board: FaultyBoard


@dataclass(frozen=True, slots=True)
class RankOutcome(Generic[_Result]):
    """Tell how one rank ended: by a value, or by an error; a rank that died has a `SimulatedCrash`."""

    rank: int
    value: _Result | None
    error: BaseException | None

    def returned(self) -> _Result:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]  # a rank without an error returned what its function returns


class RankThreads:
    """Run a function on the ranks of one job.

    A wait takes no time while every rank waits, and never more than its length. A rank that dies has the state ``gone``
    in the world; the death of rank 0 takes the board along.

    Args:
        world_size: The number of ranks.
        scripts: What goes wrong, by rank.
        world: The clock and the process states. Give the same one to each start of a job that restarts.
        first_pid: The process number of rank 0; the others count from there.
        grace_s: See `BoardGroup`.
    """

    def __init__(
        self,
        world_size: int,
        *,
        scripts: Mapping[int, MessageScript] | None = None,
        world: FakeWorld | None = None,
        first_pid: int = 1,
        grace_s: float = GRACE_S,
    ) -> None:
        self.world = world if world is not None else FakeWorld()
        self.messages = SharedMessages()
        self._first_pid = first_pid
        self._clock = SharedClock(self.world)
        ambients = [RankAmbient(self._clock, self.world, pid=first_pid + rank) for rank in range(world_size)]
        scripts = scripts or {}
        boards = [
            FaultyBoard(MemoryBoard(self.messages, rank), scripts.get(rank, MessageScript()), ambient=ambients[rank])
            for rank in range(world_size)
        ]
        self.ranks = tuple(
            RankThread(
                rank,
                BoardGroup(board, rank=rank, world_size=world_size, ambient=ambient, grace_s=grace_s),
                ambient,
                board,
            )
            for rank, (board, ambient) in enumerate(zip(boards, ambients, strict=True))
        )

    def run(
        self, act: Callable[[RankThread], _Result], *, guard_s: float = _GUARD_S
    ) -> tuple[RankOutcome[_Result], ...]:
        """Call a function in a thread for each rank, and return how each ended, in their order.

        Args:
            act: The function.
            guard_s: Real seconds after which a rank that has not ended is an `AssertionError`.
        """
        outcomes: dict[int, RankOutcome[_Result]] = {}
        start = threading.Barrier(len(self.ranks))

        def body(rank: RankThread) -> None:
            self._clock.enter()
            start.wait(guard_s)
            try:
                outcomes[rank.rank] = RankOutcome(rank.rank, act(rank), None)
            except BaseException as exc:  # noqa: BLE001 (the top of a thread: handed to the caller)
                outcomes[rank.rank] = RankOutcome(rank.rank, None, exc)
                if isinstance(exc, SimulatedCrash):
                    self._bury(rank)
            finally:
                self._clock.leave()

        threads = [
            threading.Thread(target=body, args=(rank,), name=f"rank-{rank.rank}", daemon=True) for rank in self.ranks
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(guard_s)
        stuck = [thread.name for thread in threads if thread.is_alive()]
        assert not stuck, f"ranks did not end within {guard_s:g} s: {', '.join(stuck)}"
        return tuple(outcomes[rank.rank] for rank in self.ranks)

    def _bury(self, rank: RankThread) -> None:
        self.world.states[self._first_pid + rank.rank] = "gone"
        rank.board.close()


class SharedMessages:
    """Hold the messages of all ranks; gone for good when the leader is."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.held: dict[str, bytes] = {}
        self.is_gone = False


class MemoryBoard:
    """Be one rank's access to shared messages; the access of rank 0 takes them along when it ends."""

    def __init__(self, messages: SharedMessages, rank: int) -> None:
        self._messages = messages
        self._rank = rank
        self._is_closed = False

    def post(self, key: str, message: bytes, *, limit_s: float) -> None:
        """Put a message there."""
        with self._messages.lock:
            self._require_open()
            self._messages.held[key] = bytes(message)

    def look(self, key: str, *, limit_s: float) -> bytes | None:
        """Return a message."""
        with self._messages.lock:
            self._require_open()
            return self._messages.held.get(key)

    def take(self, keys: Sequence[str], *, limit_s: float) -> dict[str, bytes]:
        """Return messages, and take them off."""
        with self._messages.lock:
            self._require_open()
            return {key: self._messages.held.pop(key) for key in keys if key in self._messages.held}

    def remove(self, keys: Sequence[str], *, limit_s: float) -> None:
        """Take messages off."""
        self.take(keys, limit_s=limit_s)

    def close(self) -> None:
        """End this access."""
        with self._messages.lock:
            self._is_closed = True
            self._messages.is_gone = self._messages.is_gone or self._rank == 0

    def _require_open(self) -> None:
        if self._is_closed or self._messages.is_gone:
            raise LeaderLostError("the board of rank 0 cannot be reached", where=f"rank {self._rank}")


class SharedClock:
    """Keep the time of a `FakeWorld` for many threads.

    When every thread that was seen here and lives is asleep, time goes to the first awakening at once. A thread of the
    library's that has only been started counts as awake, however late it comes. Else a sleep ends at the latest after
    its length in real time, so that a thread that waits for something else delays nobody.
    """

    def __init__(self, world: FakeWorld) -> None:
        self._world = world
        self._condition = threading.Condition()
        self._threads: set[threading.Thread] = set()
        self._strangers = _by_the_clock()
        self._awakenings: dict[threading.Thread, float] = {}

    def enter(self) -> None:
        """Count this thread among those that must be asleep for time to be skipped."""
        with self._condition:
            self._threads.add(threading.current_thread())

    def leave(self) -> None:
        """Count this thread no longer."""
        with self._condition:
            self._threads.discard(threading.current_thread())
            self._skip()

    def read(self) -> float:
        """Return the time."""
        self.enter()
        with self._condition:
            return self._world.seconds

    def sleep(self, seconds: float) -> None:
        """Return when the time is `seconds` later."""
        thread = threading.current_thread()
        with self._condition:
            self._threads.add(thread)
            end = self._world.seconds + seconds
            self._awakenings[thread] = end
            self._skip()
            left_s = seconds
            while self._world.seconds < end:
                tick_s = min(left_s, _TICK_S)
                if self._condition.wait(tick_s):
                    left_s = min(left_s, end - self._world.seconds)
                    continue
                left_s -= tick_s
                # A thread that has ended since the last look delays nobody any more.
                self._skip()
                if left_s <= 0:
                    self._world.seconds = max(self._world.seconds, end)
                    self._condition.notify_all()
            del self._awakenings[thread]

    def _skip(self) -> None:
        self._threads = {thread for thread in self._threads if thread.is_alive()}
        awaited = self._threads | (_by_the_clock() - self._strangers)
        if self._awakenings and awaited <= set(self._awakenings):
            self._world.seconds = max(self._world.seconds, min(self._awakenings.values()))
            self._condition.notify_all()


def _by_the_clock() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name in _BY_THE_CLOCK}


class RankAmbient:
    """Be the ambient of one rank: a process of its own on the shared clock."""

    def __init__(self, clock: SharedClock, world: FakeWorld, *, pid: int) -> None:
        self._clock = clock
        self._process = FakeAmbient(world, pid=pid)

    def now(self) -> float:
        """Return the shared time."""
        return self._clock.read()

    def monotonic(self) -> float:
        """Return the shared time."""
        return self._clock.read()

    def sleep(self, seconds: float) -> None:
        """Sleep on the shared clock."""
        self._clock.sleep(seconds)

    def token(self, byte_count: int) -> str:
        """Return entropy that is a function of the process number and the calls made so far."""
        return self._process.token(byte_count)

    def variable(self, name: str) -> str | None:
        """Return a variable of this process."""
        return self._process.variable(name)

    def process(self) -> ProcessIdentity:
        """Return this process."""
        return self._process.process()

    def pid(self) -> int:
        """Return this process's number."""
        return self._process.pid()

    def state_of(self, identity: ProcessIdentity) -> ProcessState:
        """Return what the world says of a process."""
        return self._process.state_of(identity)
