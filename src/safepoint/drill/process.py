"""One start of a command as a process, with everything it starts in turn.

1. The command leads a session of its own. Whatever it starts belongs to that session, also loader workers that left its
   process group; what made a session of its own is known by an environment variable that only this start has.
2. After `kill` none of them is left; that is looked at, not assumed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from safepoint.ambient import Ambient
from safepoint.errors import InternalError, RequestError

_END_WITHIN_S = 20.0
_TICK_S = 0.01
_TAIL_BYTES = 4096


class StartedCommand:
    """A running command. `kill` must be called, also after it has ended by itself.

    Args:
        log: A file for what the command prints.
        mark: A variable of `environment` whose value no other process has.

    Raises:
        RequestError: The command cannot be started.
    """

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], mark: str, log: Path) -> None:
        self._mark = f"{mark}={environment[mark]}".encode()
        self._exit_code: int | None = None
        with log.open("wb") as output:
            try:
                self._process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=dict(environment),
                    start_new_session=True,
                )
            except OSError as exc:
                raise RequestError(
                    "the command cannot be started", where=" ".join(command), found=exc.strerror or str(exc)
                ) from exc

    def has_ended(self) -> bool:
        """Return whether the command itself is gone; what it started may live on."""
        return self.exit_code is not None

    @property
    def exit_code(self) -> int | None:
        """Return the exit code; negative for a signal, None while it lives."""
        if self._exit_code is None:
            # The dead process is left to be waited for until `kill`: so its number names nobody else meanwhile.
            seen = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            if seen is not None:
                self._exit_code = seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status
        return self._exit_code

    def kill_one(self, process: int) -> None:
        """Kill one process that the command started; where processes can be listed, no other one."""
        if not sys.platform.startswith("linux") or process in self._members():
            _signal(process)

    def kill(self, ambient: Ambient) -> None:
        """Kill the command and all it started, at once, and return when none is left. Idempotent.

        Raises:
            InternalError: One of them is still there after a while.
        """
        if self._process.returncode is not None:
            return
        _signal_group(self._process.pid)
        deadline = ambient.monotonic() + _END_WITHIN_S
        while left := self._members():
            for pid in left:
                _signal(pid)
            if ambient.monotonic() > deadline:
                raise InternalError("processes of the command are still there after SIGKILL", found=str(left))
            ambient.sleep(_TICK_S)
        self._process.wait()

    def _members(self) -> list[int]:
        if not sys.platform.startswith("linux"):
            return []
        numbers = (int(name) for name in os.listdir("/proc") if name.isdigit())
        return [pid for pid in numbers if pid != os.getpid() and self._is_member(pid)]

    def _is_member(self, pid: int) -> bool:
        try:
            # The command's name stands in parentheses and may hold anything; state, parent, group, session follow.
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
            if fields[0] in (b"Z", b"X"):
                return False
            return int(fields[3]) == self._process.pid or self._has_mark(pid)
        except OSError:
            return False

    def _has_mark(self, pid: int) -> bool:
        return self._mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def last_lines(log: Path, count: int = 15) -> str:
    """Return the end of what a command printed."""
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-count:])


def _signal_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _signal(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return
