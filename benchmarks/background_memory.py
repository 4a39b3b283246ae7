"""How much memory does a save in the background take beyond the state, and does it stay the same?

Prints JSON. Each library saves five times in a process of its own, and an update is made as soon as the save allows it;
the greatest memory of each save is compared with the state.

    python benchmarks/background_memory.py --size 512MiB --rounds 5
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from pathlib import Path

from harness.background import NAMES, make
from harness.document import Answer, Settings, Target, options, parse_size, settings, show
from harness.files import workplace
from harness.memory import serve, watch
from harness.rounds import Series
from harness.states import Training, size_of


def be_watched(parsed: argparse.Namespace) -> None:
    """Save as often as asked, in this process."""
    training = Training(parse_size(parsed.size))
    training.compute()
    training.touch()
    with tempfile.TemporaryDirectory(dir=parsed.folder) as folder:
        way = make(parsed.watched, Path(folder), training.items, training.tensors())

        def act() -> None:
            training.touch()
            wait = way.begin()
            way.before_update()
            training.touch()
            wait()
            way.forget()

        serve(act)
        way.close()


def answer(asked: Settings, *, size: str) -> Answer:
    """Watch each library's process."""
    state = size_of(Training(asked.size_bytes).tensors())
    series, absent = Series(), {}
    with workplace(asked.folder, needed_bytes=3 * asked.size_bytes) as folder:
        for name in NAMES:
            if name.startswith("torchsnapshot") and importlib.util.find_spec("torchsnapshot") is None:
                absent[name] = "is not installed"
                continue
            arguments = ["--size", size, "--folder", str(folder), "--watched", name]
            for extra in watch(Path(__file__), arguments, rounds=asked.rounds):
                series.add(name, {"extra_bytes": float(extra), "of_state": extra / state})
    ours = series.of("of_state", "safepoint")
    return Answer(
        state={"bytes": state},
        series=series,
        targets=[
            Target("background save: extra memory", "greatest memory beyond the state / state", 1.03, False, ours),
            Target(
                "background save: extra memory stays the same over saves",
                "of the last save / of the first",
                1.01,
                False,
                [ours[-1] / ours[0]],
            ),
        ],
        absent=absent,
    )


if __name__ == "__main__":
    parser = options(__doc__, size="256MiB")
    parser.add_argument("--watched", choices=NAMES, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.watched:
        be_watched(parsed)
    else:
        asked = settings(parsed)
        show(__doc__, asked, answer(asked, size=parsed.size))
