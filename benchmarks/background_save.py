"""What does a save in the background cost a training, and when is it complete and durable?

Prints JSON. A lap is a number of real updates with one save behind the first; laps without a save lie between the
others. A forward and backward pass lasts at least twice as long as copying the state.

    python benchmarks/background_save.py --size 1GiB --rounds 5 --steps 8
"""

from __future__ import annotations

import numpy

from harness.background import Background, BarrierClock
from harness.document import Answer, Settings, Target, options, settings, show
from harness.files import come_to_rest, workplace
from harness.limits import copy_memory, touched
from harness.loop import Lap, drive, lengthen, open_all
from harness.rounds import Candidate, Series, interleave, timed
from harness.states import Training, size_of

WITHOUT = "without_saves"


def answer(asked: Settings, *, steps: int) -> Answer:
    """Measure laps with each way of saving, and without."""
    training = Training(asked.size_bytes)
    size = size_of(training.tensors())
    copy_s = seconds_of_copy(size)
    laps: dict[str, list[Lap]] = {}
    with (
        workplace(asked.folder, needed_bytes=3 * asked.size_bytes) as folder,
        BarrierClock(training.optimizer) as clock,
    ):
        compute_s = lengthen(training, least_s=2 * copy_s)
        ways, absent = open_all(folder, training)

        def lap_of(name: str, way: Background | None) -> dict[str, float]:
            lap = drive(training, clock, way, steps=steps)
            laps.setdefault(name, []).append(lap)
            return lap.quantities()

        series = interleave(
            [
                Candidate(WITHOUT, lambda: lap_of(WITHOUT, None)),
                *(Candidate(way.name, lambda way=way: lap_of(way.name, way), after=way.forget) for way in ways),
            ],
            rounds=asked.rounds,
            seconds=asked.seconds,
            between=come_to_rest,
        )
        for way in ways:
            way.close()
    for way in ways:
        extra = zip(series.of("steps_total", way.name), series.of("steps_total", WITHOUT), strict=True)
        for with_save, without in extra:
            series.add(way.name, {"extra": with_save - without})
    return Answer(
        state={"bytes": size, "copy_s": round(copy_s, 4), "compute_s": round(compute_s, 4), "steps": steps},
        series=series,
        targets=targets(series, [way.name for way in ways if way.name != "safepoint"]),
        absent=absent,
        further={"step_times": {name: tails(of[-series.rounds :]) for name, of in laps.items()}},
        notes=notes(series, steps),
    )


def seconds_of_copy(size: int) -> float:
    """Return how long one thread needs to copy so many bytes into memory that was touched."""
    source, target = touched(size), touched(size)
    return min(timed(lambda: copy_memory(target, source, threads=1))["seconds"] for _ in range(3))


def targets(series: Series, others: list[str]) -> list[Target]:
    """Compare with the best peer, for each quantity the best one."""

    def against(row: str, quantity: str, bound: float, peer: str) -> Target:
        values = series.quotient(quantity, "safepoint", peer)
        return Target(row, f"{quantity} of safepoint / of {peer}", bound, False, values)

    quickest = series.best("blocked", others)
    calls = [1e3 * value for value in series.of("call", "safepoint")]
    dcp = series.best("complete", [name for name in others if name.startswith("dcp")])
    return [
        against("background save: blocked, steps hide the copy", "blocked", 0.2, quickest),
        Target("background save: the call itself", "milliseconds", 5.0, False, calls, unit="ms"),
        against("background save: complete and durable", "complete", 0.35, dcp),
        against("background save: extra time of all steps", "extra", 0.4, series.best("extra", others)),
    ]


def tails(laps: list[Lap]) -> dict[str, float]:
    """Return percentiles of the step times of all laps, in seconds."""
    steps = [step for lap in laps for step in lap.steps]
    found = {"count": float(len(steps)), "max": max(steps)}
    for share in (50, 90, 99):
        found[f"p{share}"] = float(numpy.percentile(steps, share))
    return {name: round(value, 5) for name, value in found.items()}


def notes(series: Series, steps: int) -> list[str]:
    """Say whether the laps were long enough for each save to end within them."""
    found = []
    for name in sorted(series.document()["complete"]):
        late = sum(
            complete > total
            for complete, total in zip(series.of("complete", name), series.of("steps_total", name), strict=True)
        )
        if late:
            found.append(f"{name}: {late} saves ended after the {steps} steps, and what they cost later is not counted")
    return found


if __name__ == "__main__":
    parser = options(__doc__, size="256MiB")
    parser.add_argument("--steps", type=int, default=8, help="updates of a lap")
    parsed = parser.parse_args()
    asked = settings(parsed)
    show(__doc__, asked, answer(asked, steps=parsed.steps))
