"""What this host can tell of another process: by boot, namespace, number, start and state, never by number alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from safepoint.ambient import ProcessIdentity, SystemAmbient

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """Return a process that waits for its input to end."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def identity_of(pid: int) -> ProcessIdentity:
    """Return how a process of this host and namespace would name itself."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        start = file.read().rpartition(")")[2].split()[19]
    return replace(SystemAmbient().process(), pid=pid, start=start)


def test_a_process_knows_itself_as_running() -> None:
    """Spec: C1.2"""
    assert SystemAmbient().state_of(SystemAmbient().process()) == "running"


def test_a_process_that_runs_is_stopped_or_has_ended_is_told_as_such(other: subprocess.Popen[bytes]) -> None:
    """One that has ended and that nobody has waited for is gone as well.

    Spec: C1.2
    """
    identity, ambient = identity_of(other.pid), SystemAmbient()
    assert ambient.state_of(identity) == "running"
    other.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, other.pid, os.WSTOPPED | os.WNOWAIT)
    assert ambient.state_of(identity) == "stopped"
    other.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    assert ambient.state_of(identity) == "gone"
    other.wait()
    assert ambient.state_of(identity) == "gone"


def test_another_process_with_the_same_number_is_not_the_holder(other: subprocess.Popen[bytes]) -> None:
    """Spec: C1.2"""
    identity = identity_of(other.pid)
    assert SystemAmbient().state_of(replace(identity, start=str(int(identity.start) - 1))) == "gone"


@pytest.mark.parametrize("change", [{"boot": "another"}, {"namespace": "pid:[1]"}, {"boot": "", "namespace": ""}])
def test_a_number_of_another_kernel_start_or_namespace_says_nothing(
    other: subprocess.Popen[bytes], change: dict[str, str]
) -> None:
    """It may name another process here, or none: only the heartbeat can tell.

    Spec: C1.2
    """
    assert SystemAmbient().state_of(replace(identity_of(other.pid), **change)) == "elsewhere"
