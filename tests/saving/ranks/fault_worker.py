"""Jobs of real ranks that meet a fault in one phase of their second save: `python fault_worker.py FOLDER AT_ONCE`.

Reads a case a line, as JSON, and prints what its ranks said, a line of JSON each. Every rank is a process forked off
this one, which has imported everything and runs nothing itself.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

import safepoint as sp
import safepoint.manager
from safepoint.ambient import Ambient
from safepoint.errors import SafepointError
from safepoint.format.digest import digest_bytes
from safepoint.group.base import Group
from safepoint.group.torch_store import open_group
from safepoint.saving.context import PhaseClock

RANKS = 3
LAST, STRUCK = 3, 2
# How long ranks wait for each other, and how long from the fault on.
PATIENT_S = 60.0
DEADLINE_S = 4.0
GRACE_S = 1.0
# What would not end by itself is ended then, and counts as stuck.
GUARD_S = 90.0
_NEW_NET = 0x40000000


class Case(msgspec.Struct, frozen=True):
    """Say which rank meets what, where the phase of its second save begins.

    `fault` is the name of a signal, a command, or empty. A stopped rank goes on when the others have ended, or, where
    that is `late`, when a new start of the job has. `hosts` are network namespaces, one a rank, and `address` is
    that of the first.
    """

    name: str
    rank: int = 0
    phase: str = ""
    fault: str = ""
    late: bool = False
    hosts: list[str] = []
    address: str = ""
    interface: str = ""
    mend: str = ""


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Start the job, let it meet its fault, start it again; return what each rank of each start said."""
    folder.mkdir()
    first = start(1, case, folder)
    victim = [first[case.rank]] if case.fault in ("SIGKILL", "SIGSTOP") else []
    stuck = wait([pid for pid in first if pid not in victim])
    is_paused = case.fault == "SIGSTOP"
    if not is_paused or not case.late:
        stuck += end(victim, is_paused)
    if case.mend:
        subprocess.run(case.mend.split(), check=True)
    stuck += wait(start(2, case, folder))
    if is_paused and case.late:
        stuck += end(victim, is_paused)
    said = {
        number: [[json.loads(line) for line in said_by(folder, number, rank).open()] for rank in range(RANKS)]
        for number in (1, 2)
    }
    return {"name": case.name, "stuck": stuck, "first": said[1], "second": said[2]}


def start(number: int, case: Case, folder: Path) -> list[int]:
    """Fork the ranks off, and return their processes."""
    processes = []
    for rank in range(RANKS):
        said_by(folder, number, rank).touch()
        pid = os.fork()
        if not pid:
            try:
                live(rank, number, case, folder)
            except BaseException:  # noqa: BLE001 (the top of a process, which shows it)
                traceback.print_exc()
            finally:
                os._exit(1)
        processes.append(pid)
    return processes


def end(stopped: list[int], is_paused: bool) -> int:
    """Let stopped processes go on, wait for them, and return how many did not end by themselves."""
    for pid in stopped if is_paused else []:
        os.kill(pid, signal.SIGCONT)
    return wait(stopped)


def wait(processes: list[int]) -> int:
    """Wait for processes, and return how many had to be killed."""
    left, ends = list(processes), time.monotonic() + GUARD_S
    while left and time.monotonic() < ends:
        left = [pid for pid in left if os.waitpid(pid, os.WNOHANG)[0] == 0]
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return len(left)


def said_by(folder: Path, number: int, rank: int) -> Path:
    return folder / f"said-{number}-{rank}"


def live(rank: int, number: int, case: Case, folder: Path) -> None:
    """Be one rank: train on from what is there, save after each update, and end at the first error."""
    output = said_by(folder, number, rank).open("a", buffering=1)

    def say(step: int, what: str, text: str) -> None:
        output.write(json.dumps([step, what, text]) + "\n")

    if case.hosts:
        enter(case.hosts[rank])
        os.environ.update(MASTER_ADDR=case.address, GLOO_SOCKET_IFNAME=case.interface)
    os.dup2(os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{number}", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 8)
    # Without an optimizer, whose first step imports for seconds.
    state = {"model": model, "own": torch.Generator().manual_seed(rank)}
    safepoint.manager.find_group, safepoint.manager.FAREWELL_S = impatient_group, GRACE_S
    manager = sp.CheckpointManager(folder / "run", state, deadline_s=PATIENT_S)
    say(manager.restore().step, "resumed", weights(model))
    while manager.progress.step < LAST:
        with torch.no_grad():
            model.weight.sin_().mul_(1.0 + manager.progress.step)
        manager.after_update()
        step = manager.progress.step
        if (number, step) == (1, STRUCK):
            # Every rank has heard of the first save, then.
            dist.barrier()
            if case.fault:
                hurry(manager)
        if (number, step, rank) == (1, STRUCK, case.rank) and case.fault:
            strike_at(case.phase, case.fault)
        try:
            manager.save().wait()
        except SafepointError as exc:
            say(step, type(exc).__name__, str(exc))
            break
        say(step, "saved", weights(model))
        if (number, step) == (1, STRUCK) and case.fault:
            break
    manager.close()
    os._exit(0)


def impatient_group(*, ambient: Ambient, process_group: Any, deadline_s: float) -> Group:
    """Open a group that waits less long beyond its deadline."""
    return open_group(ambient=ambient, process_group=process_group, deadline_s=GUARD_S, grace_s=GRACE_S)


def hurry(manager: sp.CheckpointManager) -> None:
    """Let the saves that follow wait only briefly for a rank that does not come."""
    manager._saver._deadline_s = manager._saver._planner._deadline_s = DEADLINE_S


def strike_at(phase: str, fault: str) -> None:
    """Let the fault happen where the phase begins."""
    enter_phase = PhaseClock.enter

    def enter(clock: PhaseClock, entered: str) -> None:
        enter_phase(clock, entered)
        if entered != phase:
            return
        if fault.startswith("SIG"):
            os.kill(os.getpid(), signal.Signals[fault])
        else:
            subprocess.run(fault.split(), check=True)

    PhaseClock.enter = enter  # type: ignore[method-assign]  # in the process that is struck, and that one alone


def enter(host: str) -> None:
    """Move this process into a network namespace."""
    with open(f"/run/netns/{host}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NEW_NET):
            raise OSError(ctypes.get_errno(), "setns", host)


def weights(model: torch.nn.Module) -> str:
    return digest_bytes(b"".join(value.detach().numpy().tobytes() for value in model.state_dict().values()))


def main(folder: Path, at_once: int) -> None:
    under_way: dict[int, str] = {}
    for line in sys.stdin:
        case = msgspec.json.decode(line, type=Case)
        if len(under_way) == at_once:
            tell(folder, under_way)
        pid = os.fork()
        if not pid:
            said = run(case, folder / case.name)
            (folder / f"{case.name}.json").write_text(json.dumps(said))
            os._exit(0)
        under_way[pid] = case.name
    while under_way:
        tell(folder, under_way)


def tell(folder: Path, under_way: dict[int, str]) -> None:
    """Wait until one case is over, and print what its ranks said."""
    pid, status = os.wait()
    name = under_way.pop(pid)
    text = (folder / f"{name}.json").read_text() if not status else json.dumps({"name": name, "status": status})
    print(text, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
