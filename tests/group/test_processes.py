"""Ranks in processes of their own, over gloo: the same exchanges, and ranks that are stopped and killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.group.exchanges import EXCHANGES

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("worker.py")
WAIT_S = 100.0


def environment(**variables: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **variables}


def test_ranks_under_torchrun_make_every_exchange_and_those_of_a_sub_group() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", WORKER, "exchanges"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = {
        rank: [value for number, value in map(parsed, done.stdout.splitlines()) if number == rank] for rank in range(3)
    }
    names = [exchange.__name__ for exchange in EXCHANGES]
    no_member = "RequestError: this process is not a member of the process group [rank 0]."
    assert told[0] == [*names, no_member, ["x", "x", "x"], 3.0, "closed"]
    for rank, pair in ((1, [0, 2, ["1", "2"]]), (2, [1, 2, None])):
        rest = told[rank][len(names) :]
        assert told[rank][: len(names)] == names
        # The two exchanges are made at the same time, in either order.
        assert len(rest) == 4 and pair in rest[:2] and None in rest[:2] and rest[2:] == [3.0, "closed"]


@pytest.fixture
def job() -> Iterator[list[subprocess.Popen[str]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), "faults"],
            env=environment(RANK=str(rank), WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(4)
    ]
    yield ranks
    for rank in ranks:
        rank.kill()
        rank.wait()
        assert rank.stdin is not None and rank.stdout is not None
        rank.stdin.close()
        rank.stdout.close()


@pytest.mark.soak
def test_stopped_and_killed_ranks_and_leaders_end_every_wait_in_an_error(job: list[subprocess.Popen[str]]) -> None:
    """Every wait ends by itself: those that would not are ten minutes long, or have no end in torch.

    Spec: C4.1, C4.2
    """
    absent = (
        "AbortedError: 1 of 4 ranks were absent from an exchange [{}]; expected a message from each rank within 2 s; "
    )
    absent += "found nothing from rank {}. See whether those processes run and reach the host of rank 0."

    stopped = absent.format("stopped", 3)
    assert [told(job[rank]) for rank in (0, 1, 2)] == [stopped] * 3
    job[3].send_signal(signal.SIGCONT)
    assert told(job[3]) == stopped
    assert [told(rank) for rank in job] == ["returned"] * 4

    assert [told(job[rank]) for rank in (0, 1, 3)] == [absent.format("killed", 2)] * 3

    let_go(job[0])
    for rank in (1, 3):
        assert str(told(job[rank])).startswith("LeaderLostError: the store of rank 0 cannot be reached [127.0.0.1")
    job[0].send_signal(signal.SIGCONT)
    for rank in (1, 3):
        assert str(told(job[rank])).startswith("LeaderLostError: the store of rank 0 cannot be reached [127.0.0.1")
    assert [told(job[rank]) for rank in (1, 3)] == ["closed"] * 2
    assert [job[rank].wait(WAIT_S) for rank in (1, 3)] == [0, 0]


def let_go(rank: subprocess.Popen[str]) -> None:
    assert rank.stdin is not None
    rank.stdin.write("go\n")
    rank.stdin.flush()


def told(rank: subprocess.Popen[str]) -> Any:
    assert rank.stdout is not None
    return parsed(rank.stdout.readline())[1]


def parsed(line: str) -> tuple[int, Any]:
    number, _, text = line.partition(" ")
    return int(number), json.loads(text)
