"""Run scripts in processes that begin with torch imported: importing it takes longer than most of them run.

One process imports torch and then forks once for each script, so that every script has a process, a folder, an
environment and module globals of its own, and imports all else, safepoint included, itself. Run as a script, this file
is that process. What torchrun itself does is for tests that start it.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
# On the path of a process, it keeps the compiler of torch out.
EAGER = ROOT / "tests" / "eager"
_ENDS_WITHIN_S = 100


@dataclass(frozen=True, slots=True)
class Ended:
    """Tell how a script ended: its status as ``subprocess`` gives it (-14: past the time limit), and what it wrote."""

    returncode: int
    output: str
    errors: str


class WarmPython:
    """Hold the process that forks, from the first script on; leaving the ``with`` block ends it."""

    def __init__(self) -> None:
        self._started: subprocess.Popen[str] | None = None

    def __enter__(self) -> WarmPython:
        return self

    def __exit__(self, *_: object) -> None:
        if self._started is not None:
            self._started.communicate(timeout=_ENDS_WITHIN_S)

    def run(self, script: Path, *arguments: object, folder: Path, logs: Path, limit_s: int = 100) -> Ended:
        """Run a script as the main module in a folder, and wait for its end.

        Args:
            logs: Where what it writes is kept.
            limit_s: It is ended when it takes longer.
        """
        (ended,) = self._run([_job(script, arguments, folder, logs / script.stem, {}, [SOURCE])], limit_s)
        return ended

    def run_ranks(self, script: Path, *arguments: object, count: int, logs: Path, limit_s: int = 300) -> list[Ended]:
        """Run a script on each of some ranks, with the variables that torchrun sets, and wait for all of them.

        When one fails, the others are killed.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        jobs = []
        for rank in range(count):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            log = logs / f"{script.stem}-{rank}-of-{count}"
            jobs.append(_job(script, arguments, ROOT, log, variables, [SOURCE, ROOT]))
        return self._run(jobs, limit_s)

    def _run(self, jobs: list[dict[str, Any]], limit_s: int) -> list[Ended]:
        if self._started is None:
            self._started = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": "", "TORCH_CPP_LOG_LEVEL": "ERROR"},
            )
        assert self._started.stdin is not None and self._started.stdout is not None
        self._started.stdin.write(json.dumps([jobs, limit_s]) + "\n")
        self._started.stdin.flush()
        answer = self._started.stdout.readline()
        assert answer, f"the process that runs the scripts died at {jobs}"
        return [
            Ended(code, *(Path(job["log"] + end).read_text(encoding="utf-8") for end in (".out", ".err")))
            for job, code in zip(jobs, json.loads(answer), strict=True)
        ]


def _job(
    script: Path, arguments: Sequence[object], folder: Path, log: Path, variables: dict[str, str], path: Sequence[Path]
) -> dict[str, Any]:
    return {
        "words": [str(script), *map(str, arguments)],
        "folder": str(folder),
        "log": str(log),
        "variables": {**variables, "PYTHONPATH": os.pathsep.join(map(str, path))},
        "path": list(map(str, path)),
    }


def _serve() -> None:
    # The first optimizer of a process imports the compiler of torch, which takes as long as torch itself.
    import torch._dynamo  # noqa: F401

    # Else each child copies, page by page, what its own collector looks through when it ends.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        jobs, limit_s = json.loads(line)
        children: list[int] = []
        for job in jobs:
            child = os.fork()
            if not child:
                _become(job)
                signal.alarm(limit_s)
                runpy.run_path(job["words"][0], run_name="__main__")
                return
            children.append(child)
        print(json.dumps(_wait(children)), flush=True)


def _wait(children: list[int]) -> list[int]:
    """Wait for every child, and return their statuses in order; the failure of one ends the others."""
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        child, status = os.waitpid(-1, 0)
        codes[child] = os.waitstatus_to_exitcode(status)
        if codes[child]:
            for other in set(children) - set(codes):
                os.kill(other, signal.SIGKILL)
    return [codes[child] for child in children]


def _become(job: dict[str, Any]) -> None:
    """Give a forked process the outputs, the folder, the arguments and the environment of a script's own process."""
    for number, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, job["log"] + ".out", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
        (2, job["log"] + ".err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
    ):
        opened = os.open(name, flags)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(job["folder"])
    os.environ.update(job["variables"])
    sys.argv = job["words"]
    sys.path[0] = str(Path(job["words"][0]).parent)
    sys.path[1:1] = job["path"]


if __name__ == "__main__":
    _serve()
