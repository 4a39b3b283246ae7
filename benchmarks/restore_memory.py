"""How much memory does a restore take beyond the state itself?

Prints JSON. Each library restores in a process of its own, into the live state; the first time from files that are not
in the page cache.

    python benchmarks/restore_memory.py --size 512MiB --rounds 5
"""

from __future__ import annotations

import argparse
import ctypes
from pathlib import Path

from harness.document import Answer, Settings, Target, options, parse_size, settings, show
from harness.files import drop_cache, workplace
from harness.managed import Managed, restore
from harness.memory import serve, watch
from harness.peers import peers
from harness.rounds import Series
from harness.states import Training, size_of


def be_watched(parsed: argparse.Namespace) -> None:
    """Restore as often as asked, in this process, which holds the state alone and no gradients."""
    training = Training(parse_size(parsed.size))
    training.compute()
    training.touch()
    training.optimizer.zero_grad()
    # What is freed would else be given back while memory is watched.
    ctypes.CDLL(None).malloc_trim(0)
    tensors, place = training.tensors(), parsed.folder / parsed.watched
    if parsed.watched == "safepoint":
        serve(lambda: restore(place, training.items).close())
        return
    (peer,) = (peer for peer in peers()[0] if peer.name == parsed.watched)
    serve(lambda: peer.load(tensors, place))


def answer(asked: Settings, *, size: str) -> Answer:
    """Save with each library, then watch each one's process restore."""
    training = Training(asked.size_bytes)
    tensors = training.tensors()
    others, absent = peers()
    series = Series()
    with workplace(asked.folder, needed_bytes=(len(others) + 1) * asked.size_bytes) as folder:
        managed = Managed(folder / "safepoint", training.items)
        training.touch()
        managed.mark()
        managed.save()
        managed.close()
        for peer in others:
            peer.save(tensors, folder / peer.name)
        for name in ("safepoint", *(peer.name for peer in others)):
            drop_cache(folder / name)
            arguments = ["--size", size, "--folder", str(folder), "--watched", name]
            for extra in watch(Path(__file__), arguments, rounds=asked.rounds):
                series.add(name, {"extra_bytes": float(extra)})
    ours = [value / 2**20 for value in series.of("extra_bytes", "safepoint")]
    row = "restore: memory beyond the state"
    return Answer(
        state={"bytes": size_of(tensors)},
        series=series,
        targets=[Target(row, "greatest memory − memory before", 64.0, False, ours, unit="MiB")],
        absent=absent,
    )


if __name__ == "__main__":
    parser = options(__doc__, size="256MiB")
    parser.add_argument("--watched", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.watched:
        be_watched(parsed)
    else:
        asked = settings(parsed)
        show(__doc__, asked, answer(asked, size=parsed.size))
