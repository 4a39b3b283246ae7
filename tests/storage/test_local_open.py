"""What is open is closed once, whatever comes in between: its number may be that of another file right behind it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from safepoint.storage.local import LocalStorage

VERBS: dict[str, Callable[[LocalStorage], object]] = {
    "make_folder": lambda storage: storage.make_folder("a/b/c"),
    "sync_folder": lambda storage: storage.sync_folder("a/b/c"),
    "list": lambda storage: storage.list("a/b/c"),
    "names": lambda storage: storage.names("a/b/c"),
    "read": lambda storage: storage.read("a/b/c/there", limit_bytes=1),
    "size": lambda storage: storage.size("a/b/c/there"),
    "create": lambda storage: storage.create("a/b/c/object").abandon(),
}


# Behind the fourth close, a file that is read is open alone.
CASES = [(verb, number) for verb in VERBS for number in (1, 2, 3)] + [("read", 4), ("size", 4)]


@pytest.mark.parametrize(("verb", "number"), CASES)
def test_an_interrupt_right_behind_a_close_closes_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, number: int
) -> None:
    storage = LocalStorage(tmp_path)
    storage.make_folder("a/b/c")
    storage.put("a/b/c/there", b"1")
    close, closed = os.close, []

    def interrupted(descriptor: int) -> None:
        close(descriptor)
        closed.append(descriptor)
        if len(closed) == number:
            raise KeyboardInterrupt

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "close", interrupted)
        VERBS[verb](storage)
    assert len(os.listdir("/proc/self/fd")) == before
