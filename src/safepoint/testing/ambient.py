"""An ambient whose clock, entropy, host and processes a test sets."""

from __future__ import annotations

from dataclasses import dataclass, field

from safepoint.ambient import ProcessIdentity, ProcessState
from safepoint.faults.chance import Chance


@dataclass(slots=True)
class FakeWorld:
    """Hold what all processes of a test share: the clock, and the state of each process by its number.

    A process is ``running`` unless stated otherwise. `is_visible` false makes every other process look as if it ran on
    a host that cannot be asked.
    """

    seconds: float = 1_000_000.0
    states: dict[int, ProcessState] = field(default_factory=dict)
    is_visible: bool = True


class FakeAmbient:
    """Be one process of a `FakeWorld`. Sleeping moves the clock and takes no time."""

    def __init__(
        self, world: FakeWorld, *, pid: int, host: str = "host", variables: dict[str, str] | None = None
    ) -> None:
        self.world = world
        self._identity = ProcessIdentity(host, "user", "boot", "pid:[1]", pid, str(pid))
        self._variables = variables or {}
        self._chance = Chance("ambient", pid)

    def now(self) -> float:
        """Return the world's time."""
        return self.world.seconds

    def monotonic(self) -> float:
        """Return the world's time."""
        return self.world.seconds

    def sleep(self, seconds: float) -> None:
        """Move the world's time."""
        self.world.seconds += seconds

    def token(self, byte_count: int) -> str:
        """Return entropy that is a function of the process number and the calls made so far."""
        return "".join(f"{self._chance.below(256):02x}" for _ in range(byte_count))

    def variable(self, name: str) -> str | None:
        """Return a variable of this process."""
        return self._variables.get(name)

    def process(self) -> ProcessIdentity:
        """Return this process."""
        return self._identity

    def pid(self) -> int:
        """Return this process's number."""
        return self._identity.pid

    def state_of(self, identity: ProcessIdentity) -> ProcessState:
        """Return what the world says of a process."""
        if identity.pid != self._identity.pid and not self.world.is_visible:
            return "elsewhere"
        return self.world.states.get(identity.pid, "running")
