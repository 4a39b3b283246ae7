"""What does a save cost when one hundredth of the state has changed: a frozen base with adapters?

Prints JSON: seconds, and the bytes that the new checkpoint added to the disk.

    python benchmarks/partial_change.py --size 1GiB --rounds 5
"""

from __future__ import annotations

from pathlib import Path

from harness.document import Answer, Settings, Target, options, settings, show
from harness.files import come_to_rest, size_below, workplace
from harness.managed import Managed
from harness.rounds import Candidate, Series, interleave, timed
from harness.states import Adapted

ROWS = ("1 % of the state changed: bytes", "1 % of the state changed: time")


def candidate(name: str, folder: Path, adapted: Adapted, **further: object) -> tuple[Candidate, Managed]:
    """Return a way to save the state after an update of the adapters; the checkpoint before it may be needed."""
    managed = Managed(folder / name, adapted.items, **further)

    def boundary() -> None:
        adapted.touch()
        managed.mark()

    def measure() -> dict[str, float]:
        found = timed(managed.save)
        return {**found, "bytes": float(size_below(managed.generations()[-1]))}

    # The first save has no parent; an incremental manager keeps what later ones refer to.
    keeps = 1 if not further else 1 << 20
    return Candidate(name, measure, before=boundary, after=lambda: managed.forget(keeps=keeps)), managed


def answer(asked: Settings) -> Answer:
    """Measure full saves and incremental ones in turns."""
    adapted = Adapted(asked.size_bytes)
    with workplace(asked.folder, needed_bytes=5 * asked.size_bytes) as folder:
        made = [candidate("full", folder, adapted), candidate("incremental", folder, adapted, incremental=True)]
        series = interleave([one for one, _ in made], rounds=asked.rounds, seconds=asked.seconds, between=come_to_rest)
        for _, managed in made:
            managed.close()
    return Answer(
        state={"tensors": len(list(adapted.model.parameters())) + 2 * len(adapted.adapters)},
        series=series,
        targets=targets(series),
        absent={},
    )


def targets(series: Series) -> list[Target]:
    """Compare an incremental save with a full one of the same round."""
    bytes_of, seconds_of = (series.quotient(quantity, "incremental", "full") for quantity in ("bytes", "seconds"))
    compared = "incremental / full"
    return [Target(ROWS[0], compared, 0.03, False, bytes_of), Target(ROWS[1], compared, 0.15, False, seconds_of)]


if __name__ == "__main__":
    asked = settings(options(__doc__, size="256MiB").parse_args())
    show(__doc__, asked, answer(asked))
