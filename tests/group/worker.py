"""One rank of a real job: `python worker.py SCENARIO`. Prints one line of JSON for each step.

Where a step says so, the process stops or kills itself; the test that started it sees to the rest.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from safepoint.ambient import SystemAmbient
from safepoint.errors import AbortedError, SafepointError
from safepoint.group.base import Group
from safepoint.group.torch_store import open_group
from tests.group.exchanges import EXCHANGES

SHORT_S = 2.0
LONG_S = 600.0


def exchanges() -> None:
    """Make every exchange of the suite in the whole group, and in a group of its last two ranks at the same time."""
    group = open_group(ambient=SystemAmbient(), deadline_s=60.0)
    for exchange in EXCHANGES:
        exchange(group)
        say(exchange.__name__)
    last_two = dist.new_group([1, 2])
    try:
        pair: Group | None = open_group(ambient=SystemAmbient(), process_group=last_two, deadline_s=60.0)
    except SafepointError as exc:
        pair = None
        say(error_text(exc))
    whole = threading.Thread(target=lambda: say(group.gather("beside", b"x", deadline_s=60.0)))
    whole.start()
    if pair is not None:
        parts = pair.gather("pair", b"%d" % dist.get_rank(), deadline_s=60.0)
        say([pair.rank, pair.world_size, parts])
    whole.join()
    # A collective of the job's own goes on undisturbed, and no exchange was one.
    total = torch.ones(1)
    dist.all_reduce(total)
    say(total.item())
    if pair is not None:
        pair.close(deadline_s=60.0)
    group.close(deadline_s=60.0)
    say("closed")


def faults() -> None:
    """Stop rank 3, kill rank 2, stop the leader, kill the leader; each in an exchange of its own."""
    group = open_group(ambient=SystemAmbient(), deadline_s=60.0, grace_s=SHORT_S)
    rank = group.rank
    if rank == 3:
        signal_self(signal.SIGSTOP)
    say(ending(lambda: group.gather("stopped", b"", deadline_s=SHORT_S)))
    say(ending(lambda: group.gather("resumed", b"", deadline_s=LONG_S)))
    if rank == 2:
        signal_self(signal.SIGKILL)
    say(ending(lambda: group.gather("killed", b"", deadline_s=SHORT_S)))
    if rank == 0:
        # Not before the others have heard its last word.
        sys.stdin.readline()
        signal_self(signal.SIGSTOP)
        signal_self(signal.SIGKILL)
    say(ending(lambda: group.gather("leader-stopped", b"", deadline_s=SHORT_S)))
    say(ending(lambda: group.spread("leader-killed", None, deadline_s=LONG_S)))
    group.close(deadline_s=SHORT_S)
    say("closed")


def ending(call: Callable[[], object]) -> str:
    try:
        call()
    except AbortedError as exc:
        return error_text(exc)
    return "returned"


def error_text(error: SafepointError) -> str:
    return f"{type(error).__name__}: {error}"


def signal_self(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def say(value: object) -> None:
    line = f"{dist.get_rank()} {json.dumps(value, default=lambda one: one.decode())}\n"
    # In one call: the ranks of torchrun share one pipe.
    os.write(sys.stdout.fileno(), line.encode())


if __name__ == "__main__":
    dist.init_process_group("gloo")
    {"exchanges": exchanges, "faults": faults}[sys.argv[1]]()
    # Not by way of the process group's own farewell, which would wait for ranks that are dead.
    os._exit(0)
