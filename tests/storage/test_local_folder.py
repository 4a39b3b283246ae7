"""An open folder is closed once, whatever comes in between: its number may be that of another file right behind it."""

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
    "create": lambda storage: storage.create("a/b/c/object").abandon(),
}


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS.keys())
@pytest.mark.parametrize("number", [1, 2, 3])
def test_an_interrupt_right_behind_a_close_closes_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: Callable[[LocalStorage], object], number: int
) -> None:
    storage = LocalStorage(tmp_path)
    storage.make_folder("a/b/c")
    close, closed = os.close, []

    def interrupted(descriptor: int) -> None:
        close(descriptor)
        closed.append(descriptor)
        if len(closed) == number:
            raise KeyboardInterrupt

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "close", interrupted)
        verb(storage)
    assert len(os.listdir("/proc/self/fd")) == before
