"""Watch the system calls of a process from outside, and kill it at one of them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.crash.processes import LONGEST_WAIT_S, SOURCE

CALLS = (
    "openat,mkdir,mkdirat,write,pwrite64,fsync,fdatasync,ftruncate,close,link,linkat,rename,renameat,renameat2,"
    "unlink,unlinkat,rmdir"
)
_UNFINISHED = " <unfinished ...>"
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the main thread: its name, which one of that name it is, counted from 1, and its text."""

    name: str
    number: int
    text: str

    def kill(self, *, is_done: bool) -> str:
        """Return the option that kills the process at this call, which is done or is not."""
        refusal = "" if is_done else "error=EIO:"
        return f"inject={self.name}:{refusal}signal=SIGKILL:when={self.number}"


def traced(command: Sequence[str], log: Path, *options: str) -> tuple[int, str]:
    """Run a command under strace, and return its exit code and the log."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    answer = subprocess.run(
        ["strace", "-f", "-y", "-s", "0", "-o", str(log), "-e", f"trace={CALLS}", *options, *command],
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        timeout=LONGEST_WAIT_S,
    )
    if "PTRACE" in answer.stderr:
        pytest.skip(f"strace may not trace here: {answer.stderr.strip()[:200]}")
    return answer.returncode, log.read_text()


def calls_of_the_main_thread(log: str) -> list[Call]:
    """Return the calls of the thread that the log begins with; one that another thread's calls interrupt is whole."""
    lines = log.splitlines()
    main = lines[0].split()[0]
    counts: dict[str, int] = {}
    found: list[Call] = []
    for line in lines:
        rest = re.match(rf"{main} +<\.\.\. (\w+) resumed>(.*)", line)
        if rest is not None and found and found[-1].name == rest[1]:
            begun = found.pop()
            found.append(Call(begun.name, begun.number, begun.text.removesuffix(" <unfinished ...>") + rest[2]))
        match = re.match(rf"{main} +(\w+)\((.*)", line)
        if match is None:
            continue
        name, text = match.groups()
        counts[name] = counts.get(name, 0) + 1
        found.append(Call(name, counts[name], text))
    return found


def first_calls(log: str) -> list[tuple[str, Call]]:
    """Return (thread, call) of each call that is the first of its name and number in any thread: those to kill at.

    The tracer counts each thread's calls for themselves, and a kill at the n-th of a name hits whichever thread comes
    to its n-th first. Calls stand in the order in which they began.
    """
    counts: dict[tuple[str, str], int] = {}
    seen: set[tuple[str, int]] = set()
    found = []
    for line in log.splitlines():
        match = re.match(r"(\d+) +(\w+)\((.*)", line)
        if match is None:
            continue
        thread, name, text = match.groups()
        number = counts[thread, name] = counts.get((thread, name), 0) + 1
        if (name, number) not in seen:
            seen.add((name, number))
            found.append((thread, Call(name, number, text)))
    return found


def calls_of_all_threads(log: str) -> list[Call]:
    """Return every thread's calls, in the order in which they ended.

    A write that ended while a sync of the same file was at work comes after it: the sync need not have met it.
    """
    begun: dict[str, _Timed] = {}
    ended: list[_Timed] = []
    for place, line in enumerate(log.splitlines()):
        thread, told = line.split(maxsplit=1)
        call = re.match(r"(\w+)\((.*)", told)
        rest = re.match(r"<\.\.\. \w+ resumed>(.*)", told)
        if call is not None and told.endswith(_UNFINISHED):
            begun[thread] = _Timed(call[1], call[2].removesuffix(_UNFINISHED), place, place)
        elif call is not None:
            ended.append(_Timed(call[1], call[2], place, place))
        elif rest is not None:
            first = begun.pop(thread)
            ended.append(_Timed(first.name, first.text + rest[1], first.since, place))
    syncs = [call for call in ended if call.name in ("fsync", "fdatasync")]
    ended.sort(key=lambda call: max([call.until, *(sync.until + 0.5 for sync in syncs if sync.may_miss(call))]))
    return [Call(call.name, number, call.text) for number, call in enumerate(ended)]


@dataclass(frozen=True, slots=True)
class _Timed:
    """A call with the lines of the log at which it began and ended."""

    name: str
    text: str
    since: int
    until: int

    @property
    def file(self) -> str:
        return self.text.partition(",")[0].partition(")")[0]

    def may_miss(self, call: _Timed) -> bool:
        """Return whether this is a sync that was at work when a write of the same file ended."""
        return call.name in ("write", "pwrite64") and self.file == call.file and self.since < call.until < self.until
