"""What a run tells of its own saves and failures."""

from __future__ import annotations

import json

import pytest

from safepoint.catalog import read_lineage
from safepoint.errors import NotFoundError
from safepoint.format.names import journal_path
from safepoint.format.records import LineageLink
from safepoint.planning.measured import Measured, SaveTimes, measure
from safepoint.storage.base import Storage
from safepoint.storage.memory import MemoryStorage
from tests.build import MODEL, Values, begin, write_generation, write_incarnation

FIRST = (LineageLink(1, None, 0),)
PHASES = {"stage": 0.3, "digest": 0.2, "plan": 0.1, "write": 2.0, "vote": 0.3, "check": 0.1}


def a_run() -> Storage:
    """Return a run that saved at 12:10, 12:20 and 12:40, died at update 47, went on from 40 and is at work."""
    storage = MemoryStorage()
    begin(storage)
    storage.put("incarnations/000001.alive", b"17")
    for step, minute, slower in ((10, 10, 0.0), (20, 20, 1.0), (40, 40, 5.0)):
        timings = {**PHASES, "write": PHASES["write"] + slower}
        created = f"2025-03-01T12:{minute}:00+00:00"
        name = write_generation(storage, step, chain=FIRST, created=created, timings_s=timings)
    storage.make_folder("journal")
    storage.put(journal_path(1), json.dumps({"step": 47}).encode() + b"\n")
    write_incarnation(storage, 2, chain=(*FIRST, LineageLink(2, name, 40)), is_closed=False)
    return storage


def measured(storage: Storage) -> Measured:
    return measure(storage, read_lineage(storage), url="memory")


def test_medians_of_the_phases_and_of_the_times_between_saves() -> None:
    found = measured(a_run())
    assert found.saves == 3
    # Of 3, 4 and 8 seconds.
    assert found.phases_s == pytest.approx(4.0)
    assert (found.synchronous, found.background, found.is_background) == (None, None, False)
    # 10 minutes for 10 updates, 20 minutes for 20.
    assert found.period_s == 900
    assert found.update_s == 60


def test_what_saves_took_is_in_the_journals_by_how_they_were_made() -> None:
    storage = a_run()
    noted = [(0.2, 5.0, True), (4.0, 3.5, False), (0.4, 9.0, True), (0.3, 7.0, True)]
    lines = [
        {
            "event": "saved",
            "generation": "any",
            "step": 1,
            "blocked_s": blocked,
            "total_s": total,
            "is_background": beside,
        }
        for blocked, total, beside in noted
    ]
    odd: list[object] = [
        {**lines[0], "blocked_s": "long"},
        {**lines[0], "total_s": float("nan")},
        {**lines[0], "total_s": -1.0},
        {**lines[0], "is_background": 1},
        {"event": "saved"},
        ["saved"],
    ]
    storage.put(journal_path(1), b"".join(json.dumps(line).encode() + b"\n" for line in (*odd, *lines)))
    found = measured(storage)
    assert found.background == SaveTimes(saves=3, total_s=7.0, blocked_s=0.3)
    assert found.synchronous == SaveTimes(saves=1, total_s=3.5, blocked_s=4.0)
    assert found.is_background


def test_a_start_that_was_not_closed_died_but_for_the_newest_one() -> None:
    found = measured(a_run())
    assert (found.starts, found.deaths) == (2, 1)
    # From 12:00, when the first start began, to its last checkpoint.
    assert found.mtbf_s == 40 * 60
    assert found.lost_updates == 7


def test_a_run_that_never_died_tells_no_rate_of_failures() -> None:
    storage = MemoryStorage()
    begin(storage)
    write_generation(storage, 10, chain=FIRST, timings_s=PHASES)
    found = measured(storage)
    assert (found.deaths, found.mtbf_s, found.lost_updates) == (0, None, None)
    assert (found.period_s, found.update_s) == (None, None)


def test_the_size_is_that_of_a_checkpoints_own_files() -> None:
    storage = MemoryStorage()
    begin(storage)
    name = write_generation(
        storage, 10, chain=FIRST, items={**MODEL, "more": {"a": Values("uint8", (9000,), bytes(9000))}}
    )
    stored = {entry.name: entry.size_bytes for entry in storage.list(f"generations/{name}")}
    del stored["manifest.json"]
    assert measured(storage).size_bytes == sum(stored.values())


def test_a_run_without_a_checkpoint_tells_nothing() -> None:
    storage = MemoryStorage()
    begin(storage)
    with pytest.raises(NotFoundError, match="how long a save takes"):
        measured(storage)
