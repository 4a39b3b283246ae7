"""How long do a save and a restore of 5,000 small tensors take, beside the other libraries?

Prints JSON. Tensors have 4 to 64 KiB. Restores are cold, and fill the live tensors. No round is left out to begin with:
safepoint saves once before the save that is measured, and the others keep nothing between saves. DCP is measured with
two threads only, for it takes seconds with any number.

    python benchmarks/small_tensors.py --count 5000 --rounds 5
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from harness.document import Answer, Settings, Target, options, settings, show
from harness.files import come_to_rest, drop_cache, remove, workplace
from harness.managed import Managed, restore
from harness.peers import Peer, Tensors, peers
from harness.rounds import Candidate, interleave, timed
from harness.states import size_of, small_tensors


class Small:
    """Save with one way, then read back what was saved."""

    def __init__(self, folder: Path, tensors: Tensors) -> None:
        self._folder, self._tensors = folder, tensors
        self._items = {"parts": tensors}

    def ours(self) -> dict[str, float]:
        """Save in a run that has saved before, and restore with a manager of its own."""
        run = self._folder / "run"
        managed = Managed(run, self._items)
        managed.mark()
        managed.save()
        for tensor in self._tensors.values():
            tensor.add_(1)
        managed.mark()
        save_s = timed(managed.save)["seconds"]
        managed.close()
        drop_cache(run)
        opened = []
        restore_s = timed(lambda: opened.append(restore(run, self._items)))["seconds"]
        opened[0].close()
        remove(run)
        return {"save": save_s, "restore": restore_s}

    def theirs(self, peer: Peer) -> dict[str, float]:
        """Save to a new path, and load from it."""
        path = self._folder / peer.name
        save_s = timed(partial(peer.save, self._tensors, path))["seconds"]
        drop_cache(path)
        restore_s = timed(partial(peer.load, self._tensors, path))["seconds"]
        remove(path)
        return {"save": save_s, "restore": restore_s}


def answer(asked: Settings, *, count: int) -> Answer:
    """Measure save and restore of each library."""
    tensors = small_tensors(count)
    others, absent = peers()
    others = [peer for peer in others if peer.name != "dcp"]
    with workplace(asked.folder, needed_bytes=4 * size_of(tensors)) as folder:
        small = Small(folder, tensors)
        measured = [
            Candidate("safepoint", small.ours),
            *(Candidate(peer.name, partial(small.theirs, peer)) for peer in others),
        ]
        series = interleave(measured, rounds=asked.rounds, seconds=asked.seconds, warm_ups=0, between=come_to_rest)
    targets = []
    for quantity in ("save", "restore"):
        fastest = series.best(quantity, [peer.name for peer in others])
        values = series.quotient(quantity, fastest, "safepoint")
        row = f"{count:,} small tensors: {quantity}"
        targets.append(Target(row, f"time of {fastest} / time of safepoint", 2.0, True, values))
    return Answer({"tensors": count, "bytes": size_of(tensors)}, series, targets, absent)


if __name__ == "__main__":
    parser = options(__doc__, size="0")
    parser.add_argument("--count", type=int, default=5000, help="tensors")
    parsed = parser.parse_args()
    asked = settings(parsed)
    show(__doc__, asked, answer(asked, count=parsed.count))
