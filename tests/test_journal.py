"""A journal proves nothing: whatever its lines hold, what is told of a run is of the lines that are ours."""

from __future__ import annotations

import pytest

from safepoint.format.names import journal_path
from safepoint.journal import Journal, read_journal
from safepoint.storage.memory import MemoryStorage

GENERATION = "step-000000000007-i000001-0badcafe"


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"7",
        b'{"step": true}',
        b'{"step": -1}',
        b'{"step": 1000000000000}',
        b'{"step": "9"}',
        b'{"event": [], "generation": "x"}',
        b'{"event": {}, "generation": "x"}',
        b'{"event": "committed", "generation": []}',
        b'{"event": "committed"}',
        b'{"event": "committed", "generation": "step-0000',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"step": 7, "more": ' + b"[" * 100_000,
    ],
    ids=lambda line: repr(line[:24]),
)
def test_a_line_that_is_foreign_or_torn_is_passed_over(line: bytes) -> None:
    """Spec: F8.1"""
    storage = MemoryStorage()
    storage.make_root()
    storage.make_folder("journal")
    journal = Journal(storage, 1)
    journal.event("committed", generation=GENERATION, step=7)
    journal.update(8)
    journal.close()
    path = journal_path(1)
    storage.put(path, line + b"\n" + storage.read(path, limit_bytes=1000) + line)
    found = read_journal(storage, 1)
    assert (found.last_step, found.committed, found.deleted) == (8, {GENERATION}, set())


def test_what_a_save_cost_tells_as_well_that_it_was_committed() -> None:
    """The line `committed` may be torn: that of its cost, which follows, is of committed saves alone. Spec: F8.1"""
    storage = MemoryStorage()
    storage.make_root()
    storage.make_folder("journal")
    journal = Journal(storage, 1)
    journal.event("saved", generation=GENERATION, step=7, blocked_s=0.5, total_s=1.5, is_background=True)
    journal.close()
    assert read_journal(storage, 1).committed == {GENERATION}
