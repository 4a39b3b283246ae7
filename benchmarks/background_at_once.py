"""How long does a save in the background hold up a training whose next update comes at once?

Prints JSON. There is nothing to hide the copy behind: the loop is blocked by the call and by the wait before the
update.

    python benchmarks/background_at_once.py --size 1GiB --rounds 5
"""

from __future__ import annotations

from harness.background import BarrierClock
from harness.document import Answer, Settings, Target, options, settings, show
from harness.files import come_to_rest, workplace
from harness.loop import meet_update, open_all
from harness.rounds import Candidate, interleave
from harness.states import Training, size_of

ROW = "background save: blocked, the next update comes at once"


def answer(asked: Settings) -> Answer:
    """Measure each way of saving with an update directly behind it."""
    training = Training(asked.size_bytes)
    with (
        workplace(asked.folder, needed_bytes=3 * asked.size_bytes) as folder,
        BarrierClock(training.optimizer) as clock,
    ):
        ways, absent = open_all(folder, training)
        series = interleave(
            [
                Candidate(
                    way.name,
                    lambda way=way: meet_update(training, clock, way).quantities(),
                    before=training.compute,
                    after=way.forget,
                )
                for way in ways
            ],
            rounds=asked.rounds,
            seconds=asked.seconds,
            between=come_to_rest,
        )
        for way in ways:
            way.close()
    best = series.best("blocked", [way.name for way in ways if way.name != "safepoint"])
    values = series.quotient("blocked", "safepoint", best)
    return Answer(
        state={"bytes": size_of(training.tensors())},
        series=series,
        targets=[Target(ROW, f"blocked of safepoint / of {best}", 0.7, False, values)],
        absent=absent,
    )


if __name__ == "__main__":
    asked = settings(options(__doc__, size="256MiB").parse_args())
    show(__doc__, asked, answer(asked))
