"""Does the time of a save grow with its bytes alone?

Prints JSON: durable synchronous saves of states of growing size, the raw durable write of as many bytes, and the share
of the time that goes into planning, agreeing and publishing, as each save reports it.

    python benchmarks/growth.py --size 1GiB --rounds 5      # from 64 MiB up to 1 GiB
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from harness.document import Answer, Settings, Target, options, settings, show
from harness.files import come_to_rest, remove, workplace
from harness.limits import supports_direct, touched, write_buffered, write_direct
from harness.managed import Managed
from harness.rounds import Candidate, Series, interleave, timed
from harness.states import Training, size_of

LEAST = 64 << 20
# What a save does with the bytes themselves; its other phases are the work on plan, index and manifest.
PHASES_OF_BYTES = frozenset({"stage", "copy", "digest", "write"})


class Size:
    """Hold a state of one size, a manager that saves it, and as many raw bytes."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.name = f"{size_bytes >> 20}MiB"
        self._training = Training(size_bytes)
        self._managed = Managed(folder / self.name, self._training.items)
        self.size_bytes = size_of(self._training.tensors())
        self._raw, self._path = touched(self.size_bytes), folder / "raw"
        self._is_direct = supports_direct(folder)

    def candidates(self) -> list[Candidate]:
        """Return the save and the raw write."""
        return [
            Candidate(self.name, self._save, before=self._mark, after=self._managed.forget),
            Candidate(f"raw_{self.name}", lambda: self._per_gb(self._write), after=lambda: remove(self._path)),
        ]

    def close(self) -> None:
        """Let the run go."""
        self._managed.close()

    def _mark(self) -> None:
        self._training.touch()
        self._managed.mark()

    def _save(self) -> dict[str, float]:
        handles = []
        found = self._per_gb(lambda: handles.append(self._managed.save()))
        phases = handles[0].result.timings_s
        other = sum(value for name, value in phases.items() if name not in PHASES_OF_BYTES)
        return {**found, "other_share": other / found["seconds"]}

    def _write(self) -> None:
        if self._is_direct:
            write_direct(self._path, self._raw, threads=2)
        else:
            write_buffered(self._path, self._raw, by_range=False)

    def _per_gb(self, action: Callable[[], object]) -> dict[str, float]:
        found = timed(action)
        return {**found, "seconds_per_gb": found["seconds"] / self.size_bytes * 1e9}


def answer(asked: Settings) -> Answer:
    """Measure every size from the least one up, each four times the one before, the last as asked."""
    sizes = [asked.size_bytes]
    while sizes[0] // 4 >= LEAST:
        sizes.insert(0, sizes[0] // 4)
    with workplace(asked.folder, needed_bytes=3 * asked.size_bytes) as folder:
        states = [Size(folder, size) for size in sizes]
        candidates = [one for state in states for one in state.candidates()]
        series = interleave(candidates, rounds=asked.rounds, seconds=asked.seconds, between=come_to_rest)
        for state in states:
            state.close()
    return Answer({"sizes_bytes": [state.size_bytes for state in states]}, series, targets(series, states))


def targets(series: Series, states: list[Size]) -> list[Target]:
    """Compare the seconds for a gigabyte of the largest state with those of the next smaller one."""
    largest = states[-1].name
    smaller = states[-2].name if len(states) > 1 else largest
    return [
        Target(
            "growth: seconds per gigabyte stay the same",
            f"{largest} / {smaller}",
            1.1,
            False,
            series.quotient("seconds_per_gb", largest, smaller),
        ),
        Target(
            "growth: work on the manifest",
            f"share of the save of {largest}",
            0.02,
            False,
            series.of("other_share", largest),
        ),
    ]


if __name__ == "__main__":
    asked = settings(options(__doc__, size="1GiB").parse_args())
    show(__doc__, asked, answer(asked))
