"""How long does a restore take, from the disk and from the page cache, beside the other libraries and the raw limits?

Prints JSON. safepoint verifies every byte; no peer verifies any. All really read every byte: what only maps a file has
to copy it. Cold means that this system holds no page of the files (what lies beneath a virtual disk is not ours to
empty).

    python benchmarks/restore.py --size 1GiB --rounds 5
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from harness.document import Answer, Settings, Target, options, settings, show
from harness.files import cached_share, come_to_rest, drop_cache, size_below, warm_cache, workplace
from harness.limits import read_limits, touched, write_buffered
from harness.managed import Managed, restore
from harness.peers import Peer, load_torch_mapped, peers
from harness.rounds import Candidate, Series, interleave, timed
from harness.states import Training, size_of


class Readings:
    """Hold one saved state for each way to read it, and read it cold or warm."""

    def __init__(self, folder: Path, training: Training, others: list[Peer]) -> None:
        self._folder, self._training = folder, training
        self._tensors = training.tensors()
        # Both ways to save with DCP are read alike.
        others = [peer for peer in others if peer.name != "dcp_2_threads"]
        managed = Managed(folder / "safepoint", training.items)
        training.touch()
        managed.mark()
        managed.save()
        managed.close()
        self._loads = {peer.name: partial(peer.load, self._tensors, folder / peer.name) for peer in others}
        for peer in others:
            peer.save(self._tensors, folder / peer.name)
        self._places = {name: folder / name for name in ("safepoint", *self._loads)}
        self._loads["torch_load_mapped"] = partial(load_torch_mapped, self._tensors, folder / "torch_save")
        self._places["torch_load_mapped"] = folder / "torch_save"
        self._target = touched(size_of(self._tensors))
        write_buffered(folder / "raw", self._target, by_range=False)
        self._open: list[Callable[[], None]] = []

    def candidates(self, *, cold: bool) -> list[Candidate]:
        """Return every way to read, with its files out of the page cache or in it."""
        prepare = drop_cache if cold else warm_cache
        ours = Candidate(
            "safepoint",
            lambda: timed(self._restore),
            before=lambda: prepare(self._places["safepoint"]),
            after=self._close,
        )
        theirs = [
            Candidate(name, partial(timed, load), before=partial(prepare, self._places[name]))
            for name, load in self._loads.items()
        ]
        return [ours, *theirs, *read_limits(self._folder / "raw", self._target, cold=cold)]

    def shares_cached(self) -> dict[str, float | None]:
        """Return which share of each one's bytes stays in the page cache when it was dropped."""
        for path in self._places.values():
            drop_cache(path)
        return {name: cached_share(path) for name, path in self._places.items()}

    def stored_bytes(self) -> dict[str, int]:
        """Return what each one's files take."""
        return {name: size_below(path) for name, path in self._places.items()}

    def _restore(self) -> None:
        manager = restore(self._places["safepoint"], self._training.items)
        self._open.append(manager.close)

    def _close(self) -> None:
        while self._open:
            self._open.pop()()


def answer(asked: Settings) -> Answer:
    """Measure cold rounds, then warm ones."""
    training = Training(asked.size_bytes)
    others, absent = peers()
    both = Series()
    with workplace(asked.folder, needed_bytes=(len(others) + 3) * asked.size_bytes) as folder:
        readings = Readings(folder, training, others)
        for kind in ("cold", "warm"):
            measured = readings.candidates(cold=kind == "cold")
            both.take(
                interleave(measured, rounds=asked.rounds, seconds=asked.seconds / 2, between=come_to_rest),
                {"seconds": kind},
            )
        cached, stored = readings.shares_cached(), readings.stored_bytes()
    return Answer(
        state={"bytes": size_of(training.tensors())},
        series=both,
        targets=targets(both),
        absent=absent,
        further={"cached_share_when_cold": cached, "stored_bytes": stored},
    )


def targets(series: Series) -> list[Target]:
    """Compare with the raw limit and with the peers."""
    names = list(series.document()["cold"])
    raw = series.best("cold", [name for name in names if name.startswith("raw_")])
    peer = series.best("cold", [name for name in names if name != "safepoint" and not name.startswith("raw_")])

    def speed(row: str, kind: str, other: str, bound: float) -> Target:
        values = series.quotient(kind, other, "safepoint")
        return Target(row, f"time of {other} / time of safepoint", bound, True, values)

    return [
        speed("restore, cold, verified: of the raw limit", "cold", raw, 0.95),
        speed("restore, cold, verified: against the fastest peer, unverified", "cold", peer, 1.0),
        speed("restore, warm, verified: against DCP, unverified", "warm", "dcp", 3.0),
    ]


if __name__ == "__main__":
    asked = settings(options(__doc__, size="512MiB").parse_args())
    show(__doc__, asked, answer(asked))
