"""What local storage makes of calls that the system refuses, cuts short or answers in doubt."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from safepoint.errors import ObjectExistsError, OutcomeUnknownError, StorageError
from safepoint.storage import local, local_files, local_naming
from safepoint.storage.base import Entry
from safepoint.storage.local import LocalStorage


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    storage = LocalStorage(tmp_path / "run")
    storage.make_root()
    return storage


def read_all(storage: LocalStorage, path: str) -> bytes:
    return storage.read(path, limit_bytes=1 << 20)


def test_errors_say_the_path_the_number_and_the_remedy(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        errno.ENOSPC: "disk is full",
        errno.EDQUOT: "quota",
        errno.EACCES: "permission is denied",
        errno.EROFS: "read-only",
        errno.EIO: "device failed",
    }
    for number, text in texts.items():
        monkeypatch.setattr(os, "pwrite", failing_with(number))
        writer = storage.create(f"object-{number}")
        with pytest.raises(StorageError, match=text) as caught:
            writer.write(memoryview(b"data"))
        assert caught.value.errno == number
        assert caught.value.where == f"{storage.url}/object-{number}"
        assert caught.value.remedy
        assert not caught.value.retryable
        assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY])
def test_passing_failures_are_marked_retryable(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    storage.publish("object", b"data")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", failing_with(number))
        with pytest.raises(StorageError) as caught:
            read_all(storage, "object")
    assert caught.value.retryable


def test_short_writes_and_reads_are_completed(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes(range(256))
    real_write, real_pwrite, real_pread, real_preadv = os.write, os.pwrite, os.pread, os.preadv
    monkeypatch.setattr(os, "write", lambda descriptor, view: real_write(descriptor, view[:100]))
    monkeypatch.setattr(os, "pwrite", lambda descriptor, view, at: real_pwrite(descriptor, view[:100], at))
    monkeypatch.setattr(os, "pread", lambda descriptor, size, at: real_pread(descriptor, min(size, 100), at))
    monkeypatch.setattr(os, "preadv", lambda descriptor, views, at: real_preadv(descriptor, [views[0][:100]], at))
    writer = storage.create("created")
    writer.write(memoryview(data))
    writer.finish()
    storage.publish("published", data)
    assert read_all(storage, "created") == read_all(storage, "published") == data
    buffer = bytearray(250)
    storage.read_into("created", 5, memoryview(buffer))
    assert buffer == data[5:255]


def test_a_failed_sync_is_final(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = storage.create("object")
    writer.write(memoryview(b"data"))
    with monkeypatch.context() as patch:
        patch.setattr(local_files, "sync_descriptor", failing_with(errno.EIO))
        with pytest.raises(StorageError, match="device failed"):
            writer.finish()
    for call in (writer.finish, lambda: writer.write(memoryview(b"more"))):
        with pytest.raises(StorageError):
            call()
    writer.abandon()


def test_a_failed_write_makes_the_object_unfinishable(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = storage.create("object")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing_with(errno.ENOSPC))
        with pytest.raises(StorageError, match="disk is full"):
            writer.write(memoryview(b"data"))
    with pytest.raises(StorageError):
        writer.finish()


def test_a_failed_close_is_reported(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = storage.create("object")
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", failing_with(errno.EDQUOT))
        with pytest.raises(StorageError, match="quota"):
            writer.finish()


@pytest.mark.parametrize("step", ["write_all", "sync_descriptor"])
def test_a_publish_that_fails_before_the_name_leaves_nothing(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(local, step, failing_with(errno.ENOSPC))
    with pytest.raises(StorageError, match="disk is full"):
        storage.publish("object", b"data")
    assert storage.list("") == []


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS])
def test_without_hard_links_a_name_is_given_by_a_rename_that_replaces_nothing(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "link", failing_with(number))
    storage.publish("object", b"first")
    with pytest.raises(ObjectExistsError):
        storage.publish("object", b"second")
    assert read_all(storage, "object") == b"first"
    assert storage.list("") == [Entry("object", False, 5)]


def test_a_rename_counts_as_giving_the_name(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", failing_with(errno.EPERM))
    storage.create("temporary").finish()
    folder = os.open(storage.url, os.O_RDONLY)
    try:
        assert local_naming.name_exclusively(folder, "temporary", "named")
    finally:
        os.close(folder)
    assert storage.list("") == [Entry("named", False, 0)]


def test_without_links_and_exclusive_renames_an_object_is_created_exclusively(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", failing_with(errno.EPERM))
    monkeypatch.setattr(local_naming, "rename_exclusively", failing_with(errno.ENOSYS))
    synced: list[int] = []
    monkeypatch.setattr(local, "sync_descriptor", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    storage.publish("object", b"first")
    with pytest.raises(ObjectExistsError):
        storage.publish("object", b"again!")
    assert synced == [5, 5, 6]
    assert read_all(storage, "object") == b"first"
    assert storage.list("") == [Entry("object", False, 5)]


def test_a_failure_after_an_exclusive_create_leaves_the_outcome_open(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "name_exclusively", lambda *_: False)
    failures = iter([None, OSError(errno.EIO, "sync")])

    def sync(descriptor: int) -> None:
        failure = next(failures)
        if failure is not None:
            raise failure

    monkeypatch.setattr(local, "sync_descriptor", sync)
    with pytest.raises(OutcomeUnknownError):
        storage.publish("object", b"data")


@pytest.mark.parametrize("number", [errno.EIO, errno.ETIMEDOUT, errno.ESTALE])
def test_an_error_while_the_name_is_given_leaves_the_outcome_open(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real_link = os.link

    def link(*arguments: Any, **options: Any) -> None:
        real_link(*arguments, **options)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(OutcomeUnknownError):
        storage.publish("object", b"data")
    assert read_all(storage, "object") == b"data"
    assert storage.list("") == [Entry("object", False, 4)]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS])
def test_a_refusal_to_give_the_name_is_no_doubt(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "link", failing_with(number))
    with pytest.raises(StorageError) as caught:
        storage.publish("object", b"data")
    assert caught.value.errno == number
    assert storage.list("") == []


def test_a_repeated_link_that_meets_our_own_file_is_a_success(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_link = os.link

    def link(*arguments: Any, **options: Any) -> None:
        real_link(*arguments, **options)
        # What a network file system does when the answer to the first request was lost.
        real_link(*arguments, **options)

    monkeypatch.setattr(os, "link", link)
    storage.publish("object", b"data")
    assert read_all(storage, "object") == b"data"


def test_a_root_is_made_durable_from_the_deepest_folder_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(local, "sync_descriptor", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    if not os.path.exists("/proc/self/fd"):
        pytest.skip("needs /proc to tell which folder a descriptor is")
    LocalStorage(tmp_path / "a" / "b").make_root()
    assert synced == [str(tmp_path.parent), str(tmp_path), str(tmp_path / "a")]
    synced.clear()
    LocalStorage(tmp_path / "a" / "b").make_root()
    assert synced == [str(tmp_path / "a")]


def test_a_folder_that_cannot_be_synced_is_an_error(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "sync_descriptor", failing_with(errno.EINVAL))
    with pytest.raises(StorageError, match="does not offer"):
        storage.sync_folder("")


def failing_with(number: int) -> Callable[..., None]:
    def fail(*_arguments: object, **_options: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail
