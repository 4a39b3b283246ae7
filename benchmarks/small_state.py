"""How long does a save of 1 MiB take, beside the syncs that it needs?

Prints JSON. The syncs are those of the specification's order: the folder of generations, the data file, the index,
their folder, the manifest, the folder again; with as many bytes as a save of this state writes, and nothing else.

    python benchmarks/small_state.py --size 1MiB --rounds 30
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from harness.document import Answer, Settings, Target, options, settings, show
from harness.files import come_to_rest, remove, sync_path, workplace
from harness.managed import Managed
from harness.peers import peers
from harness.rounds import Candidate, interleave, timed

TENSORS = 16


@dataclass(frozen=True, slots=True)
class Written:
    """Hold bytes of the sizes of a save's files."""

    data: bytes
    index: bytes
    manifest: bytes

    @classmethod
    def by(cls, managed: Managed) -> Written:
        """Return those of the newest checkpoint."""
        newest = managed.generations()[-1]
        (data,), (index,) = newest.glob("rank-*.safetensors"), newest.glob("rank-*.json")
        return cls(*(os.urandom(path.stat().st_size) for path in (data, index, newest / "manifest.json")))


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and sync it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def needed_syncs(generations: Path, written: Written) -> None:
    """Do what a crash-safe save of these bytes has to ask of the disk."""
    generation = generations / "generation"
    generation.mkdir()
    sync_path(generations)
    write_synced(generation / "data", written.data)
    write_synced(generation / "index", written.index)
    sync_path(generation)
    write_synced(generation / "manifest.new", written.manifest)
    os.link(generation / "manifest.new", generation / "manifest")
    os.unlink(generation / "manifest.new")
    sync_path(generation)


def answer(asked: Settings) -> Answer:
    """Measure safepoint, the peers and the bare syncs."""
    size = asked.size_bytes // TENSORS // 4
    tensors = {f"part.{number}": torch.randn(size) for number in range(TENSORS)}
    others, absent = peers()
    with workplace(asked.folder, needed_bytes=64 << 20) as folder:
        managed = Managed(folder / "run", {"parts": tensors})
        path, bare = folder / "peer", folder / "generations"
        bare.mkdir()

        def boundary() -> None:
            for tensor in tensors.values():
                tensor.add_(1)
            managed.mark()

        boundary()
        managed.save()
        written = Written.by(managed)
        managed.forget()
        series = interleave(
            [
                Candidate("safepoint", lambda: timed(managed.save), before=boundary, after=managed.forget),
                Candidate(
                    "needed_syncs",
                    lambda: timed(lambda: needed_syncs(bare, written)),
                    after=lambda: remove(bare / "generation"),
                ),
                *(
                    Candidate(
                        peer.name,
                        partial(timed, partial(peer.save, tensors, path)),
                        after=partial(remove, path),
                    )
                    for peer in others
                ),
            ],
            rounds=asked.rounds,
            seconds=asked.seconds,
            between=come_to_rest,
        )
        managed.close()
    pairs = zip(series.of("seconds", "safepoint"), series.of("seconds", "needed_syncs"), strict=True)
    over = [1e3 * (ours - bare_s) for ours, bare_s in pairs]
    row = "1 MiB state: save, beyond the syncs it needs"
    return Answer(
        state={"tensors": TENSORS},
        series=series,
        targets=[Target(row, "time of safepoint − time of the syncs", 3.0, False, over, unit="ms")],
        absent=absent,
    )


if __name__ == "__main__":
    asked = settings(options(__doc__, size="1MiB", rounds=30).parse_args())
    show(__doc__, asked, answer(asked))
