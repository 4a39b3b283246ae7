"""What only a real file system can show: links, special files, permissions, full disks."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import safepoint
from safepoint.errors import CorruptionError, ObjectExistsError, RequestError, StorageError
from safepoint.storage.base import Entry
from safepoint.storage.local import LocalStorage


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def storage(root: Path) -> LocalStorage:
    storage = LocalStorage(root)
    storage.make_root()
    return storage


def read_all(storage: LocalStorage, path: str) -> bytes:
    return storage.read(path, limit_bytes=1 << 20)


def reading_calls(storage: LocalStorage, path: str) -> list[Callable[[], object]]:
    return [
        lambda: storage.size(path),
        lambda: storage.read(path, limit_bytes=100),
        lambda: storage.read_into(path, 0, memoryview(bytearray(1))),
    ]


def test_a_link_in_the_place_of_an_object_is_neither_read_nor_listed(storage: LocalStorage, root: Path) -> None:
    outside = root.parent / "outside"
    outside.write_bytes(b"secret")
    (root / "link").symlink_to(outside)
    for call in reading_calls(storage, "link"):
        with pytest.raises(CorruptionError):
            call()
    assert storage.list("") == []


def test_a_link_in_the_place_of_an_object_is_not_written_through(storage: LocalStorage, root: Path) -> None:
    outside = root.parent / "outside"
    outside.write_bytes(b"kept")
    (root / "link").symlink_to(outside)
    (root / "dangling").symlink_to(root.parent / "made")
    for path in ("link", "dangling"):
        with pytest.raises(ObjectExistsError):
            storage.create(path)
        with pytest.raises(ObjectExistsError):
            storage.publish(path, b"data")
        with pytest.raises(StorageError):
            storage.append(path)
        storage.put(path, b"data")
        assert not (root / path).is_symlink()
    assert outside.read_bytes() == b"kept"
    assert not (root.parent / "made").exists()


def test_a_link_in_the_place_of_a_folder_is_not_followed_by_any_verb(storage: LocalStorage, root: Path) -> None:
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "object").write_bytes(b"kept")
    (root / "link").symlink_to(outside)
    reads = [*reading_calls(storage, "link/object"), lambda: storage.list("link")]
    for call in reads:
        with pytest.raises(CorruptionError):
            call()
    writes: list[Callable[[], object]] = [
        lambda: storage.make_folder("link"),
        lambda: storage.make_folder("link/below"),
        lambda: storage.sync_folder("link"),
        lambda: storage.create("link/new"),
        lambda: storage.publish("link/new", b""),
        lambda: storage.put("link/object", b""),
        lambda: storage.append("link/object"),
        lambda: storage.delete("link/object"),
        lambda: storage.delete_folder("link"),
    ]
    for call in writes:
        with pytest.raises(StorageError):
            call()
    assert [(path.name, path.read_bytes()) for path in outside.iterdir()] == [("object", b"kept")]


def test_the_root_may_be_a_link_and_lie_below_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for root in (tmp_path / "link", tmp_path / "link" / "run"):
        storage = LocalStorage(root)
        storage.make_root()
        storage.publish("object", b"data")
        assert read_all(storage, "object") == b"data"
    assert (tmp_path / "real" / "run" / "object").read_bytes() == b"data"


def test_special_files_are_refused_without_waiting(storage: LocalStorage, root: Path) -> None:
    os.mkfifo(root / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        # Bound by a short relative name: the path of a socket is limited to about a hundred bytes.
        where = os.getcwd()
        os.chdir(root)
        try:
            server.bind("socket")
        finally:
            os.chdir(where)
    for path in ("fifo", "socket"):
        for call in reading_calls(storage, path):
            with pytest.raises(CorruptionError):
                call()
        with pytest.raises(StorageError):
            storage.append(path)
        with pytest.raises(ObjectExistsError):
            storage.create(path)
    assert storage.list("") == []


def test_names_outside_the_grammar_are_left_out_of_a_listing(storage: LocalStorage, root: Path) -> None:
    for name in ("with space", "ümlaut", "fine", "fine~"):
        (root / name).write_bytes(b"12")
    (root / os.fsdecode(b"\xff\xfe")).write_bytes(b"")
    assert storage.list("") == [Entry("fine", False, 2)]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o007])
def test_files_and_folders_get_the_permissions_that_the_umask_leaves(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        storage = LocalStorage(tmp_path / "above" / "run")
        storage.make_root()
        storage.make_folder("folder")
        storage.create("created").finish()
        storage.publish("published", b"")
        storage.put("put", b"")
        storage.append("appended").close()
    finally:
        os.umask(before)
    root = tmp_path / "above" / "run"
    for folder in (root.parent, root, root / "folder"):
        assert folder.stat().st_mode & 0o7777 == 0o777 & ~umask, folder
    for name in ("created", "published", "put", "appended"):
        assert (root / name).stat().st_mode & 0o7777 == 0o666 & ~umask, name


def test_a_relative_root_stays_where_it_was_when_the_working_folder_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    storage = LocalStorage("runs/digits")
    monkeypatch.chdir(tmp_path / "elsewhere")
    storage.make_root()
    storage.publish("object", b"data")
    assert (tmp_path / "runs" / "digits" / "object").read_bytes() == b"data"
    assert storage.url == "runs/digits"


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a file system in which nobody can make a folder")
@pytest.mark.parametrize("path", ["/proc/no-run", "/proc/no-run/below"])
def test_a_place_that_takes_no_folder_is_told_as_such(path: str) -> None:
    with pytest.raises(StorageError, match="the file system makes none there") as caught:
        LocalStorage(path).make_root()
    assert caught.value.code == "storage" and "Choose a place" in caught.value.remedy


def test_a_file_in_the_place_of_the_root_is_an_error_and_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"kept")
    for root in (tmp_path / "file", tmp_path / "file" / "run"):
        for look in (LocalStorage(root).root_exists, LocalStorage(root).make_root):
            with pytest.raises(RequestError, match="a run is a folder"):
                look()
    assert (tmp_path / "file").read_bytes() == b"kept"


def test_a_damaged_size_does_not_make_memory(storage: LocalStorage, root: Path) -> None:
    with open(root / "huge", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CorruptionError):
        storage.read("huge", limit_bytes=1 << 20)


def test_descriptors_are_closed_whatever_happens(storage: LocalStorage, root: Path) -> None:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc to count descriptors")
    (root / "link").symlink_to(root)
    storage.make_folder("a/b")
    storage.publish("a/b/object", b"data")
    before = len(os.listdir("/proc/self/fd"))
    for path in ("a/b/object", "a/b/absent", "link/object", "a", "absent/x"):
        for verb in (storage.size, storage.list, storage.create, storage.append, storage.make_folder, storage.delete):
            ignoring_errors(verb, path)
        ignoring_errors(lambda path: storage.publish(path, b""), path)
    assert len(os.listdir("/proc/self/fd")) == before


def ignoring_errors(verb: Callable[[str], object], path: str) -> None:
    try:
        opened = verb(path)
    except (StorageError, CorruptionError, RequestError):
        return
    for closing in ("abandon", "close"):
        if hasattr(opened, closing):
            getattr(opened, closing)()


FULL_DISK_PROGRAM = """
import errno, sys
import pytest
from safepoint.errors import StorageError
from safepoint.storage.local import LocalStorage

storage = LocalStorage(sys.argv[1] + "/run")
storage.make_root()
storage.publish("before", b"kept")
writer = storage.create("large")
with pytest.raises(StorageError, match="disk is full") as caught:
    for _ in range(100):
        writer.write(memoryview(bytes(64 * 1024)))
    writer.finish()
assert caught.value.errno == errno.ENOSPC
with pytest.raises(StorageError, match="disk is full"):
    storage.publish("record", bytes(8192))
with pytest.raises(StorageError, match="disk is full"):
    storage.put("before", bytes(8192))
assert [entry.name for entry in storage.list("")] == ["before", "large"]
assert storage.read("before", limit_bytes=4) == b"kept"
print("seen to hold")
"""


def test_a_full_disk_is_said_and_leaves_what_was_published(tmp_path: Path) -> None:
    # In a mount namespace of its own, so that the small file system goes with the process, however that ends.
    mount = 'mount -t tmpfs -o size=256k tmpfs "$1" || exit 77; exec "$2" -c "$3" "$1"'
    inside = ["sh", "-c", mount, "sh", str(tmp_path), sys.executable, FULL_DISK_PROGRAM]
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare to mount a small file system")
    answer = subprocess.run(
        ["unshare", "--map-root-user", "--mount", *inside],
        env={**os.environ, "PYTHONPATH": str(Path(safepoint.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if answer.returncode == 77 or "unshare" in answer.stderr:
        pytest.skip(f"needs the right to mount a small file system: {answer.stderr.strip()}")
    assert answer.stdout == "seen to hold\n", answer.stderr
