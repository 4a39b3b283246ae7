"""How long does a durable save take, beside the other libraries and the disk's own limit?

Prints JSON. Every save makes a new file or folder and ends when files and folder are synced. safepoint's digests are
included.

    python benchmarks/synchronous_save.py --size 1GiB --rounds 5
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from harness.document import Answer, Settings, Target, options, settings, show
from harness.files import come_to_rest, remove, workplace
from harness.limits import touched, write_limits
from harness.managed import Managed
from harness.peers import Peer, peers
from harness.rounds import Candidate, interleave, timed
from harness.states import Training, size_of


def candidates(folder: Path, training: Training, others: list[Peer]) -> tuple[list[Candidate], Managed]:
    """Return safepoint, the peers and the raw limits, for the same number of bytes."""
    managed = Managed(folder / "run", training.items)
    tensors = training.tensors()

    def boundary() -> None:
        training.touch()
        managed.mark()

    ours = Candidate("safepoint", lambda: timed(managed.save), before=boundary, after=managed.forget)
    path = folder / "peer"
    theirs = [
        Candidate(
            peer.name,
            partial(timed, partial(peer.save, tensors, path)),
            before=training.touch,
            after=partial(remove, path),
        )
        for peer in others
    ]
    return [ours, *theirs, *write_limits(folder, touched(size_of(tensors)))], managed


def answer(asked: Settings) -> Answer:
    """Measure all candidates, and compare."""
    training = Training(asked.size_bytes)
    others, absent = peers()
    with workplace(asked.folder, needed_bytes=3 * asked.size_bytes) as folder:
        measured, managed = candidates(folder, training, others)
        series = interleave(measured, rounds=asked.rounds, seconds=asked.seconds, between=come_to_rest)
        managed.close()
    raw = [one.name for one in measured if one.name.startswith("raw_")]
    limit = series.best("seconds", raw)
    fastest = series.best("seconds", [peer.name for peer in others])

    def speed(row: str, other: str, bound: float) -> Target:
        values = series.quotient("seconds", other, "safepoint")
        return Target(row, f"time of {other} / time of safepoint", bound, True, values)

    tensors = training.tensors()
    return Answer(
        state={"tensors": len(tensors), "bytes": size_of(tensors)},
        series=series,
        targets=[
            speed("synchronous save, of the raw limit", limit, 0.95),
            speed("synchronous save, against the fastest peer", fastest, 1.4),
            speed("synchronous save, against DCP with two threads", "dcp_2_threads", 2.3),
        ],
        absent=absent,
    )


if __name__ == "__main__":
    asked = settings(options(__doc__, size="512MiB").parse_args())
    show(__doc__, asked, answer(asked))
