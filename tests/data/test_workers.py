"""Worker processes in a job that is signalled, and in one that is killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from safepoint.data import ResumableLoader
from tests.data.datasets import Numbers, epoch_of, ids

ROOT = Path(__file__).parents[2]
LONGEST_WAIT_S = 30

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux's process descriptors")

# Prints the numbers of its workers, one batch for each line it is sent, and at the end what it did.
TRAINING = """
import os, signal, sys
from safepoint.data import ResumableLoader
from tests.data.datasets import Numbers, ids

class Named(Numbers):
    def __getitem__(self, index):
        return index, os.getpid(), "x" * {padding}

def collate(samples):
    return samples

signals = []
signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
loader = ResumableLoader(Named(40), 2, seed=1, num_workers=2, prefetch_factor=4, collate_fn=collate)
for batch in loader:
    print(batch[0][1], *(sample[0] for sample in batch), flush=True)
    sys.stdin.readline()
print("done", len(signals), flush=True)
"""


@contextmanager
def training(padding: int = 0) -> Iterator[subprocess.Popen[str]]:
    """Run a training process in a process group of its own, as a scheduler does."""
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING.replace("{padding}", str(padding))],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def next_batch(process: subprocess.Popen[str]) -> list[int]:
    """Return the worker and the ids of the batch that the process has received."""
    assert process.stdout is not None
    return [int(word) for word in process.stdout.readline().split()]


def let_go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_a_signal_to_the_jobs_process_group_loses_no_batch() -> None:
    with training() as process:
        batches = []
        for number in range(20):
            batches.append(next_batch(process))
            if number == 5:
                os.killpg(process.pid, signal.SIGTERM)
            let_go(process)
        assert process.stdout is not None
        assert process.stdout.readline().split() == ["done", "1"]
    assert [batch[1:] for batch in batches] == epoch_of(40, 2, seed=1, epoch=0)
    assert len({batch[0] for batch in batches}) == 2


# With the padding a worker has more to send than a pipe holds, so it waits inside its queue when the reader is gone.
@pytest.mark.parametrize("padding", [0, 200_000])
def test_no_worker_outlives_a_training_process_that_was_killed(padding: int) -> None:
    with training(padding) as process:
        workers = []
        for _ in range(2):
            workers.append(os.pidfd_open(next_batch(process)[0]))
            let_go(process)
        process.kill()
        left = {worker for worker in workers if not select.select([worker], [], [], LONGEST_WAIT_S)[0]}
        for worker in left:
            signal.pidfd_send_signal(worker, signal.SIGKILL)
        for worker in workers:
            os.close(worker)
    assert not left


def test_the_users_own_start_of_a_worker_is_called_with_its_number(tmp_path: Path) -> None:
    def start(worker: int) -> None:
        (tmp_path / f"worker-{worker}").write_text(f"{os.getpid()} {os.getpgid(0)}")

    list(ResumableLoader(Numbers(8), 2, seed=1, num_workers=2, worker_init_fn=start))
    groups = [path.read_text().split() for path in sorted(tmp_path.iterdir())]
    assert [len(set(group)) for group in groups] == [1, 1]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["worker-0", "worker-1"]


def test_workers_may_be_started_without_fork() -> None:
    loader = ResumableLoader(Numbers(8), 2, seed=1, num_workers=1, multiprocessing_context="spawn")
    assert [ids(batch) for batch in loader] == epoch_of(8, 2, seed=1, epoch=0)
