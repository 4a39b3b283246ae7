"""Memory for transfers past the cache: aligned, in huge pages, of no use and no cost to children."""

from __future__ import annotations

import errno
import mmap
import os
import warnings

import pytest

from safepoint.errors import StorageError
from safepoint.storage import aligned
from safepoint.storage.aligned import aligned_memory
from safepoint.storage.reading import aligned_buffer
from tests.storage.mappings import address_of, flags_at

SIZE = 4 << 20


class Refusing(mmap.mmap):
    """Be memory of a system that takes no advice."""

    def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def test_memory_begins_on_a_page_and_is_empty() -> None:
    memory = aligned_memory(SIZE)
    assert len(memory) == SIZE
    assert address_of(memoryview(memory)) % 4096 == 0
    assert memory[:] == bytes(SIZE)


def test_huge_pages_are_asked_for_and_children_are_given_none() -> None:
    memory = aligned_memory(SIZE)
    assert {"hg", "wf"} <= flags_at(address_of(memoryview(memory)))
    # Shared between processes, it would be of small pages on most systems.
    assert "sh" not in flags_at(address_of(memoryview(memory)))


def test_buffers_for_reading_are_such_memory() -> None:
    buffer = aligned_buffer(SIZE)
    assert len(buffer) == SIZE
    assert {"hg", "wf"} <= flags_at(address_of(buffer))


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="children are given other memory on Linux alone")
def test_a_child_that_is_forked_off_finds_zeroes_and_leaves_the_memory_as_it_is() -> None:
    memory = aligned_memory(SIZE)
    memory[:4] = b"kept"
    with warnings.catch_warnings():
        # Newer Pythons warn of a fork beside threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        found = memory[:4]
        memory[:4] = b"lost"
        os._exit(0 if found == bytes(4) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert memory[:4] == b"kept"


def test_a_system_that_takes_no_advice_gives_memory_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aligned.mmap, "mmap", Refusing)
    memory = aligned_memory(SIZE)
    memory[-4:] = b"last"
    assert memory[SIZE - 4 :] == b"last"
    assert address_of(memoryview(memory)) % 4096 == 0


def test_memory_that_the_system_does_not_give_is_an_error_that_says_how_much() -> None:
    with pytest.raises(StorageError, match=r"1152921504606846976 bytes.*ulimit -v") as caught:
        aligned_memory(1 << 60)
    assert caught.value.errno == errno.ENOMEM
