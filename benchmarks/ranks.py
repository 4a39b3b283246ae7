"""How long does a save of 2 and 4 ranks on one disk take, beside one rank's save of the same bytes?

Prints JSON. One job of four processes holds the same state several times: whole on one rank, divided by FSDP2 over two
and over four, and replicated by DDP on two and on four. They take turns; ranks that have no part wait at a barrier.

    python benchmarks/ranks.py --size 512MiB --rounds 5
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from harness.document import Answer, Settings, Target, options, settings, show
from harness.files import workplace
from harness.rounds import Series

RANKS = 4
_DEADLINE_S = 600


def answer(asked: Settings) -> Answer:
    """Start the job, and compare what its leader wrote down."""
    with workplace(asked.folder, needed_bytes=6 * asked.size_bytes) as folder:
        found = run_job(folder, asked)
    series = Series()
    for name, rounds in found["seconds"].items():
        for value in rounds:
            series.add(name, {"seconds": value})
    return Answer(
        state={"bytes": found["bytes"]},
        series=series,
        targets=[
            Target(
                f"{count} ranks on one disk, {kind}: total time of a save",
                "of one rank's save of the same bytes",
                1.1,
                False,
                series.quotient("seconds", f"{kind}_{count}", "one_rank"),
            )
            for kind in ("fsdp2", "ddp")
            for count in (2, 4)
        ],
    )


def run_job(folder: Path, asked: Settings) -> dict[str, dict[str, list[float]]]:
    """Start four processes with torchrun, and return what they measured.

    Raises:
        RuntimeError: They failed.
    """
    report = folder / "report.json"
    script = Path(__file__).parent / "harness" / "rank_job.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", str(script)]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [*command, str(asked.size_bytes), str(asked.rounds), str(asked.seconds), str(folder), str(report)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=_DEADLINE_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the job of {RANKS} ranks failed:\n{done.stderr[-4000:]}")
    return json.loads(report.read_text(encoding="utf-8"))


if __name__ == "__main__":
    asked = settings(options(__doc__, size="256MiB").parse_args())
    show(__doc__, asked, answer(asked))
