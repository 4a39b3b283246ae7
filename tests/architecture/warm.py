"""Run scripts in processes that begin with torch imported: importing it takes longer than most of them run.

One process imports torch and then forks once for each script, so that every script has a process, a folder and module
globals of its own, and imports all else, safepoint included, itself. Run as a script, this file is that process.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

LONGEST_RUN_S = 100


@dataclass(frozen=True, slots=True)
class Ended:
    """Tell how a script ended: its status as ``subprocess`` gives it (-14: past the time limit), and what it wrote."""

    returncode: int
    output: str


class WarmPython:
    """Hold the process that forks; leaving the ``with`` block ends it."""

    def __init__(self, *, source: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(source)},
        )

    def __enter__(self) -> WarmPython:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=LONGEST_RUN_S)

    def run(self, script: Path, *, folder: Path) -> Ended:
        """Run a script as the main module in a folder, and wait for its end."""
        log = script.with_suffix(".log")
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(script), str(folder), str(log)]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the process that runs the scripts died at {script}"
        return Ended(json.loads(answer), log.read_text(encoding="utf-8"))


def _serve() -> None:
    # The first optimizer of a process imports the compiler of torch, which takes as long as torch itself.
    import torch._dynamo  # noqa: F401

    # Else each child copies, page by page, what its own collector looks through when it ends.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        script, folder, log = json.loads(line)
        child = os.fork()
        if not child:
            _become(script, folder, log)
            signal.alarm(LONGEST_RUN_S)
            runpy.run_path(script, run_name="__main__")
            return
        _, status = os.waitpid(child, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)


def _become(script: str, folder: str, log: str) -> None:
    """Give a forked process the outputs, the folder and the arguments of a script's own process."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    sys.argv = [script]
    sys.path[0] = str(Path(script).parent)


if __name__ == "__main__":
    _serve()
