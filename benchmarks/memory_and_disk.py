"""What can this machine's memory and disk do?

Prints JSON: seconds and gigabytes per second of copying into touched memory, of taking digests, of durable writes and
of reads, with nothing else to do. The other questions measure what they need of it again, between their candidates.

    python benchmarks/memory_and_disk.py --size 1GiB --rounds 5
"""

from __future__ import annotations

import statistics
from functools import partial

from harness.document import Answer, Settings, options, settings, show
from harness.files import come_to_rest, workplace
from harness.limits import copy_memory, read_limits, take_digests, touched, write_buffered, write_limits
from harness.rounds import Candidate, interleave, timed


def answer(asked: Settings) -> Answer:
    """Measure each limit."""
    source, target = touched(asked.size_bytes), touched(asked.size_bytes, seed=1)
    with workplace(asked.folder, needed_bytes=3 * asked.size_bytes) as folder:
        path = folder / "stored"
        write_buffered(path, source, by_range=False)
        measured = [
            *(
                Candidate(f"copy_{threads}", partial(timed, partial(copy_memory, target, source, threads=threads)))
                for threads in (1, 2)
            ),
            *(
                Candidate(f"digest_{threads}", partial(timed, partial(take_digests, source, threads=threads)))
                for threads in (1, 2)
            ),
            *(named("write", one) for one in write_limits(folder, source, buffered=True)),
            *(named("read_cold", one) for one in read_limits(path, target, cold=True)),
            *(named("read_warm", one) for one in read_limits(path, target, cold=False)),
        ]
        series = interleave(measured, rounds=asked.rounds, seconds=asked.seconds, between=come_to_rest)
    rates = {
        one.name: round(asked.size_bytes / statistics.median(series.of("seconds", one.name)) / 1e9, 3)
        for one in measured
    }
    return Answer(state={}, series=series, further={"gigabytes_per_second": rates})


def named(kind: str, candidate: Candidate) -> Candidate:
    """Return the candidate under a name that says what it does."""
    name = candidate.name.replace("raw", kind)
    return Candidate(name, candidate.measure, before=candidate.before, after=candidate.after)


if __name__ == "__main__":
    asked = settings(options(__doc__, size="256MiB").parse_args())
    show(__doc__, asked, answer(asked))
