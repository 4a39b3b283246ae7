"""The only reader of clock, entropy, host, process and environment.

Everything that differs between two runs of the same call enters here, so that a test can replace it and play any host,
any clock and any process.
"""

from __future__ import annotations

import getpass
import os
import secrets
import socket
import sys
import time
from dataclasses import dataclass
from typing import Literal, Protocol

ProcessState = Literal["running", "stopped", "gone", "elsewhere"]


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Name one process so that it cannot be confused with a later one of the same number.

    `boot` and `namespace` say within which kernel start and which process namespace `pid` counts; `start` is the
    process's start time in the kernel's own ticks. Fields that the platform does not tell are empty.
    """

    host: str
    user: str
    boot: str
    namespace: str
    pid: int
    start: str


class Ambient(Protocol):
    """Give access to what is different on each call."""

    def now(self) -> float:
        """Return seconds since the epoch, for people to read; never compared between hosts."""

    def monotonic(self) -> float:
        """Return seconds on a clock that only goes forward."""

    def sleep(self, seconds: float) -> None:
        """Let time pass."""

    def token(self, byte_count: int) -> str:
        """Return fresh entropy as hexadecimal text, two characters per byte."""

    def variable(self, name: str) -> str | None:
        """Return an environment variable."""

    def process(self) -> ProcessIdentity:
        """Return the identity of this process."""

    def pid(self) -> int:
        """Return the number of this process, at no cost: a fork shows in it."""

    def state_of(self, identity: ProcessIdentity) -> ProcessState:
        """Return what can be known of a process: ``elsewhere`` when this host cannot tell."""


class SystemAmbient:
    """Read the real clock, entropy, host, process table and environment."""

    def now(self) -> float:
        """Return seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds on the monotonic clock."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)

    def token(self, byte_count: int) -> str:
        """Return entropy of the operating system; never touches Python's random streams."""
        return secrets.token_hex(byte_count)

    def variable(self, name: str) -> str | None:
        """Return an environment variable."""
        return os.environ.get(name)

    def process(self) -> ProcessIdentity:
        """Return the identity of this process."""
        return ProcessIdentity(
            host=socket.gethostname(),
            user=_user(),
            boot=_first_line("/proc/sys/kernel/random/boot_id"),
            namespace=_link("/proc/self/ns/pid"),
            pid=os.getpid(),
            start=_stat_of(os.getpid())[1],
        )

    def pid(self) -> int:
        """Return the number that the system gives at this call."""
        return os.getpid()

    def state_of(self, identity: ProcessIdentity) -> ProcessState:
        """Look the process up, if it counts within this kernel start and process namespace."""
        here = self.process()
        if not here.boot or (here.boot, here.namespace) != (identity.boot, identity.namespace):
            return "elsewhere"
        state, start = _stat_of(identity.pid)
        if start != identity.start or state in ("", "Z", "X", "x"):
            return "gone"
        return "stopped" if state in ("T", "t") else "running"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid()) if hasattr(os, "getuid") else ""


def _first_line(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.readline().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _stat_of(pid: int) -> tuple[str, str]:
    """Return (state letter, start time in ticks) of a process, empty when there is none or no /proc."""
    if not sys.platform.startswith("linux"):
        return "", ""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return "", ""
    # The command name stands in parentheses and may itself hold spaces and parentheses.
    fields = text[text.rfind(")") + 2 :].split()
    return fields[0], fields[19]
