"""Play one start of a command: start it, follow its events, kill it where the plan says, and note what was seen."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safepoint.ambient import Ambient
from safepoint.drill.events import Apart, Closed, Committed, Event, Phase, Restored, State, Update
from safepoint.drill.pipes import JointPipes, Pipes
from safepoint.drill.plan import Kill, Trigger
from safepoint.drill.process import StartedCommand
from safepoint.drill.trace import Ending, Start
from safepoint.evidence import PIPES_VARIABLE, ROOT_VARIABLE


@dataclass(frozen=True, slots=True)
class Stage:
    """Hold what all starts of a drill share.

    Args:
        command: What to start, as a list of arguments.
        folder: Where logs and runs lie.
        environment: The environment of the command.
        until: The update to end at; None lets the command end by itself.
        patience_s: How long the command may be silent between two events.
        ranks: How many ranks torchrun starts of the command; 0 starts the command itself.
    """

    command: tuple[str, ...]
    folder: Path
    environment: Mapping[str, str]
    ambient: Ambient
    until: int | None = None
    patience_s: float = 300.0
    ranks: int = 0

    @property
    def started(self) -> tuple[str, ...]:
        """Return what is started: the command, or torchrun with it."""
        if not self.ranks:
            return self.command
        launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks))
        if self.command[0] == "-m":
            return (*launcher, "-m", "--", *self.command[1:])
        is_script = self.command[0].endswith(".py")
        # Without the dashes torchrun takes an option of the command that begins like one of its own.
        return (*launcher, *([] if is_script else ["--no-python"]), "--", *self.command)


def play(stage: Stage, root: str, label: str, *, kill: Kill | None = None, update_seconds: float = 0.0) -> Start:
    """Start the command once, with its runs under a folder of the stage, and return what was seen.

    Args:
        root: The name of the folder below the stage's that the command's runs are made in.
        label: The name of the log.
        kill: Where the start dies; None lets it come to its end.
        update_seconds: How long one update takes: the unit of a kill's delay.

    Raises:
        RequestError: The command cannot be started.
    """
    runs, log = stage.folder / root, stage.folder / f"{label}.log"
    runs.mkdir(exist_ok=True)
    # Not in the stage's folder: a pipe's path is short on some systems, and nothing of it is to be kept.
    with tempfile.TemporaryDirectory(prefix="safepoint-drill-") as place, _pipes(stage, Path(place)) as pipes:
        watched = {PIPES_VARIABLE: pipes.variable, ROOT_VARIABLE: str(runs)}
        environment = {**stage.environment, **watched}
        started = StartedCommand(stage.started, environment=environment, mark=PIPES_VARIABLE, log=log)
        try:
            return _Player(stage, pipes, started, kill, update_seconds).follow(str(log))
        finally:
            started.kill(stage.ambient)


def _pipes(stage: Stage, place: Path) -> Pipes | JointPipes:
    return JointPipes(place, stage.ambient, stage.ranks) if stage.ranks else Pipes(place, stage.ambient)


class _Player:
    """Follow one start from its first event to its end."""

    def __init__(
        self,
        stage: Stage,
        pipes: Pipes | JointPipes,
        started: StartedCommand,
        kill: Kill | None,
        update_seconds: float,
    ) -> None:
        self._stage = stage
        self._pipes = pipes
        self._started = started
        self._kill = kill
        self._trigger = Trigger(kill) if kill is not None else None
        self._update_seconds = update_seconds
        self._kill_at: float | None = None
        self._updates: list[Update] = []
        self._update_times: list[float] = []
        self._restored: Restored | None = None
        self._committed: list[int] = []
        self._state: Mapping[str, str] | None = None
        self._is_closed = False
        self._is_connected = self._is_early = False
        self._place = "before its first event"

    def follow(self, log: str) -> Start:
        began = self._stage.ambient.monotonic()
        ending = self._run()
        exit_code = self._started.exit_code if ending in (Ending.FAILED, Ending.FINISHED) else None
        times = self._update_times
        return Start(
            ending=ending,
            place=self._place,
            updates=tuple(self._updates),
            restored=self._restored,
            committed=tuple(self._committed),
            state=self._state,
            exit_code=exit_code,
            kill=self._kill,
            log=log,
            is_connected=self._is_connected,
            seconds=self._stage.ambient.monotonic() - began,
            update_seconds=(times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0,
            ranks=self._stage.ranks,
            is_early=self._is_early,
        )

    def _run(self) -> Ending:
        while True:
            event = self._next()
            if event is None:
                return self._ended()
            self._note(event)
            if isinstance(event, Apart):
                return Ending.FAILED
            if self._dies_at(event):
                return self._die()
            if self._is_last(event):
                self._ask_state()
                if not self._is_closed:
                    self._started.kill(self._stage.ambient)
                    return Ending.STOPPED
            self._pipes.answer("go")

    def _next(self) -> Event | None:
        deadline = self._stage.ambient.monotonic() + self._stage.patience_s
        if self._kill_at is not None:
            deadline = min(deadline, self._kill_at)
        return self._pipes.next_event(deadline=deadline, has_ended=self._started.has_ended)

    def _ended(self) -> Ending:
        """Say how a start ended that tells nothing more."""
        if self._started.has_ended():
            return Ending.FINISHED if self._is_closed and self._started.exit_code == 0 else Ending.FAILED
        if self._kill_at is not None and self._stage.ambient.monotonic() >= self._kill_at:
            return self._die()
        self._started.kill(self._stage.ambient)
        return Ending.SILENT

    def _die(self) -> Ending:
        if self._kill is not None and self._kill.rank is not None and isinstance(self._pipes, JointPipes):
            return self._lose(self._kill.rank, self._pipes)
        self._started.kill(self._stage.ambient)
        return Ending.KILLED

    def _lose(self, rank: int, pipes: JointPipes) -> Ending:
        """Kill one rank, and see that the others end by themselves, with the process that started them."""
        ambient = self._stage.ambient
        began, place = ambient.monotonic(), f"{self._place}, rank {rank} alone"
        self._started.kill_one(pipes.processes[rank])
        pipes.let_go()
        while event := pipes.next_event(deadline=began + self._stage.patience_s, has_ended=self._started.has_ended):
            self._note(event)
        took_s = ambient.monotonic() - began
        if not self._started.has_ended():
            self._place = f"{place}: the others were still there {took_s:.0f} s later"
            self._started.kill(ambient)
            return Ending.SILENT
        self._place = f"{place}: the others ended within {took_s:.1f} s, exit code {self._started.exit_code}"
        return Ending.KILLED

    def _dies_at(self, event: Event) -> bool:
        if self._kill is None or self._trigger is None:
            return False
        is_met = self._kill_at is None and self._trigger.meets(event)
        # A start that comes to its end before its kill was due dies there.
        if self._is_last(event):
            self._is_early = self._kill_at is None and not is_met
            return True
        if is_met:
            delay_s = self._kill.delay * self._update_seconds
            self._kill_at = self._stage.ambient.monotonic() + delay_s
            return delay_s == 0
        return False

    def _is_last(self, event: Event) -> bool:
        if isinstance(event, Closed):
            return True
        return isinstance(event, Update) and event.step == self._stage.until

    def _ask_state(self) -> None:
        self._pipes.answer("state")
        event = self._next()
        if isinstance(event, State):
            self._state = event.items

    def _note(self, event: Event) -> None:
        self._is_connected = True
        if isinstance(event, Restored):
            self._restored = event
            self._place = "before any update" if event.is_fresh else f"after restoring step {event.step}"
        elif isinstance(event, Update):
            self._updates.append(event)
            self._update_times.append(self._stage.ambient.monotonic())
            self._place = f"after update {event.step}"
        elif isinstance(event, Phase):
            self._place = f"in phase {event.phase!r} of a save after update {self._last_step()}"
        elif isinstance(event, Committed):
            self._committed.append(event.step)
            self._place = f"after committing step {event.step}"
        elif isinstance(event, Apart):
            self._place = f"with its ranks apart: {event.places}"
        elif isinstance(event, Closed):
            self._is_closed = True
            self._place = f"at its end after update {self._last_step()}"

    def _last_step(self) -> int:
        if self._updates:
            return self._updates[-1].step
        return self._restored.step if self._restored is not None else 0
