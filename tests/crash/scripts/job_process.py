"""Be one process of the torch-free job, on real files: restore, say what was restored, save step after step.

Prints one JSON object a line. With ``--saves n`` it ends in order after n saves, else it goes on until it is killed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from safepoint.ambient import SystemAmbient
from safepoint.errors import SafepointError
from safepoint.storage.local import LocalStorage
from safepoint.testing.ambient import FakeWorld
from tests.crash.job import Job, Weights


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--saves", type=int, default=1_000_000)
    parser.add_argument("--takeover", action="store_true")
    parser.add_argument("--waits", action="store_true", help="wait for a line of input before a save, and at the end")
    parser.add_argument("--ballast-mib", type=int, default=0, help="save so much more than the small state")
    parser.add_argument("--piece-bytes", type=int, default=1 << 20, help="of what is written at a time")
    options = parser.parse_args()
    ambient = SystemAmbient()
    storage, world = LocalStorage(options.root), FakeWorld()
    # One piece for a small file: all its calls are those of the main thread, where most tests look at them.
    pieces = options.piece_bytes
    job = Job(storage, world, pid=os.getpid(), ambient=ambient, takeover=options.takeover, piece_bytes=pieces)
    if options.ballast_mib:
        job.items["ballast"] = Weights("ballast", data=bytearray(options.ballast_mib << 20))
    try:
        report = job.start()
        say(restored=report.step, state=[[step, data.hex()] for step, data in sorted(job.state())])
        for step in range(report.step + 1, report.step + 1 + options.saves):
            if options.waits:
                sys.stdin.readline()
            job.train_to(step)
            mark("save-begins")
            job.save()
            mark("save-ends")
            say(saved=step)
        if options.waits:
            sys.stdin.readline()
        job.end()
    except SafepointError as error:
        say(error=type(error).__name__, text=str(error))
        return error.exit_code
    return 0


def mark(name: str) -> None:
    """Leave a mark in the log of whoever traces the calls of this process."""
    try:
        os.close(os.open(f"/{name}", os.O_RDONLY))
    except FileNotFoundError:
        return


if __name__ == "__main__":
    sys.exit(main())
