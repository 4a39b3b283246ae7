"""The names in a folder are those that a listing shows, whichever storage is asked."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from safepoint.errors import CorruptionError, StorageError
from safepoint.storage.base import Storage
from safepoint.storage.local import LocalStorage
from safepoint.storage.memory import MemoryStorage
from safepoint.storage.naming import names_in
from safepoint.storage.url import open_storage

MAKERS: dict[str, Callable[[Path], Storage]] = {
    "local": LocalStorage,
    "patient": open_storage,
    "memory": lambda path: MemoryStorage(),
}


@pytest.fixture(params=MAKERS)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    storage = MAKERS[request.param](tmp_path / "run")
    storage.make_root()
    return storage


def test_names_are_those_of_a_listing_in_its_order(storage: Storage) -> None:
    storage.make_folder("b/z")
    for name in ("b/y", "b/.tmp-0", "b/A", "b/a"):
        storage.publish(name, b"some")
    assert names_in(storage, "b") == {".tmp-0": False, "A": False, "a": False, "y": False, "z": True}
    assert list(names_in(storage, "b")) == [entry.name for entry in storage.list("b")]
    assert names_in(storage, "b/z") == names_in(storage, "b/absent") == names_in(storage, "absent/more") == {}


def test_names_that_no_verb_could_reach_are_left_out(tmp_path: Path) -> None:
    for name in ("file", "with space", "é", "new\nline"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "folder").mkdir()
    (tmp_path / "to_file").symlink_to("file")
    (tmp_path / "to_folder").symlink_to("folder")
    (tmp_path / "to_nothing").symlink_to("nothing")
    os.mkfifo(tmp_path / "pipe")
    for storage in (LocalStorage(tmp_path), open_storage(tmp_path)):
        assert names_in(storage, "") == {"file": False, "folder": True}
        assert [entry.name for entry in storage.list("")] == ["file", "folder"]


@pytest.mark.parametrize("stands", ["file", "link"])
def test_what_stands_in_the_place_of_the_folder_is_damage(tmp_path: Path, stands: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to("elsewhere")
    for path in (stands, f"{stands}/below"):
        with pytest.raises(CorruptionError):
            names_in(open_storage(tmp_path), path)


def test_no_file_is_asked_for_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    storage = LocalStorage(tmp_path)
    monkeypatch.setattr(storage, "list", lambda path: pytest.fail("it was listed"))
    assert names_in(storage, "") == {"file": False}


def test_a_folder_is_asked_for_its_names_again_after_a_passing_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    scan, numbers = os.scandir, [errno.EIO, errno.ESTALE]

    def failing(folder: int) -> object:
        if numbers:
            raise OSError(numbers.pop(), "played")
        return scan(folder)

    storage = open_storage(tmp_path)
    monkeypatch.setattr(os, "scandir", failing)
    with pytest.raises(StorageError, match="EIO"):
        names_in(storage, "")
    assert names_in(storage, "") == {"file": False}
