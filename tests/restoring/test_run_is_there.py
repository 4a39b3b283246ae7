"""Whether a run is there is told by its own record, and where that is lost by all that is left of the run."""

from __future__ import annotations

import pytest

from safepoint.errors import NotFoundError
from safepoint.faults.storage import FaultyStorage
from safepoint.format.names import GENERATIONS, RUN_RECORD
from safepoint.joining.claim import claim_incarnation, record_resumed
from safepoint.restoring.select import Wish, check_run_is_there
from safepoint.storage.memory import MemoryStorage
from safepoint.testing.ambient import FakeAmbient, FakeWorld

WISH = Wish(required=True)


@pytest.fixture
def memory() -> MemoryStorage:
    memory = MemoryStorage()
    memory.make_root()
    ambient = FakeAmbient(FakeWorld(), pid=1)
    for _ in range(3):
        claim = claim_incarnation(memory, ambient, world_size=1, versions={}, takeover=True)
        record_resumed(memory, ambient, claim, resumed=None, step=0, chain=())
    return memory


def test_of_a_run_whose_record_is_whole_no_start_is_read(memory: MemoryStorage) -> None:
    storage = FaultyStorage(memory)
    check_run_is_there(storage, WISH)
    assert [path for _, verb, path in storage.operations if verb == "read"] == [RUN_RECORD]


@pytest.mark.parametrize("left", [None, b"{}"])
def test_a_run_whose_record_is_lost_is_there_all_the_same(memory: MemoryStorage, left: bytes | None) -> None:
    memory.delete(RUN_RECORD)
    if left is not None:
        memory.publish(RUN_RECORD, left)
    check_run_is_there(memory, WISH)


def test_a_folder_without_records_is_no_run() -> None:
    memory = MemoryStorage()
    memory.make_root()
    memory.make_folder(GENERATIONS)
    with pytest.raises(NotFoundError, match="no run here"):
        check_run_is_there(memory, WISH)
