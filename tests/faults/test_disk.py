"""What a power cut may leave of a simulated disk: every legal state, and no other."""

from __future__ import annotations

import pytest

from safepoint.errors import ObjectExistsError, RequestError
from safepoint.faults.disk import SimulatedDisk
from safepoint.storage.base import Storage

Contents = dict[str, "bytes | None"]


def made() -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.make_root()
    return disk


def contents(storage: Storage, folder: str = "") -> Contents:
    """Return all that can be reached: bytes of objects, None for folders; temporary objects left out."""
    found: Contents = {}
    for entry in storage.list(folder):
        path = f"{folder}/{entry.name}" if folder else entry.name
        if entry.is_folder:
            found |= {path: None, **contents(storage, path)}
        elif not entry.name.startswith(".tmp-"):
            found[path] = storage.read(path, limit_bytes=1 << 20)
    return found


def states(disk: SimulatedDisk, *, seed: int = 3, limit: int = 1000) -> list[Contents]:
    """Return the distinct contents of all crash states, in their order."""
    distinct: list[Contents] = []
    for state in disk.crash_states(seed, limit):
        if contents(state) not in distinct:
            distinct.append(contents(state))
    return distinct


def write(disk: SimulatedDisk, path: str, data: bytes) -> None:
    writer = disk.create(path)
    writer.write(memoryview(data))
    writer.finish()


def test_before_the_root_is_made_nothing_is_left() -> None:
    (state,) = SimulatedDisk().crash_states(1, 10)
    assert not state.root_exists()


def test_the_root_is_durable_when_it_is_made() -> None:
    (state,) = made().crash_states(1, 10)
    assert state.root_exists()
    assert contents(state) == {}


def test_a_synced_file_in_a_synced_folder_is_in_every_state() -> None:
    disk = made()
    write(disk, "a", b"data")
    disk.sync_folder("")
    assert states(disk) == [{"a": b"data"}]


def test_a_synced_file_whose_name_is_not_is_whole_or_absent() -> None:
    disk = made()
    write(disk, "a", b"data")
    assert states(disk) == [{}, {"a": b"data"}]


def test_an_unsynced_file_is_absent_empty_zeroed_torn_or_whole() -> None:
    disk = made()
    disk.create("a").write(memoryview(b"\1\2\3"))
    found = states(disk)
    assert {} in found
    assert {"a": b""} in found
    assert {"a": b"\0\0\0"} in found
    assert {"a": b"\1\2\3"} in found
    torn = [state["a"] for state in found if state and state["a"] not in (b"", b"\0\0\0", b"\1\2\3")]
    assert all(data in (b"\1", b"\1\2") for data in torn)


def test_a_seed_decides_where_a_large_file_is_torn() -> None:
    disk = made()
    disk.create("a").write(memoryview(b"\1" * 10_000))
    disk.sync_folder("")
    cuts, zeroed_pages = set(), set()
    for seed in range(30):
        for state in states(disk, seed=seed):
            data = state["a"]
            assert data is not None
            if 0 < len(data) < 10_000:
                assert data == b"\1" * len(data)
                cuts.add(len(data))
            elif 0 < data.count(0) < 10_000:
                start = data.index(0)
                length = min(4096, 10_000 - start)
                assert data == b"\1" * start + bytes(length) + b"\1" * (10_000 - start - length)
                zeroed_pages.add(start)
    assert len(cuts) > 20
    assert zeroed_pages == {0, 4096, 8192}


def test_an_abandoned_file_never_becomes_durable() -> None:
    disk = made()
    writer = disk.create("a")
    writer.write(memoryview(b"12"))
    writer.abandon()
    disk.sync_folder("")
    assert {"a": b""} in states(disk)


def test_a_published_object_is_whole_or_absent_and_may_leave_its_temporary_name() -> None:
    disk = made()
    disk.publish("a", b"data")
    found = [
        {entry.name: state.read(entry.name, limit_bytes=4) for entry in state.list("")}
        for state in disk.crash_states(1, 10)
    ]
    temporary = ".tmp-0000000000000000"
    assert len(found) == 4
    for expected in ({}, {"a": b"data"}, {temporary: b"data"}, {"a": b"data", temporary: b"data"}):
        assert expected in found


def test_names_are_kept_or_lost_each_for_itself() -> None:
    disk = made()
    for name in ("a", "b", "c"):
        write(disk, name, b"")
    found = states(disk)
    assert len(found) == 8
    assert {"a": b"", "c": b""} in found


def test_a_sync_covers_the_names_given_before_it_and_no_later_one() -> None:
    disk = made()
    write(disk, "early", b"1")
    disk.sync_folder("")
    write(disk, "late", b"2")
    assert states(disk) == [{"early": b"1"}, {"early": b"1", "late": b"2"}]


def test_a_sync_of_one_folder_does_nothing_for_another() -> None:
    disk = made()
    disk.make_folder("a")
    disk.make_folder("b")
    disk.sync_folder("")
    write(disk, "a/x", b"1")
    write(disk, "b/y", b"2")
    disk.sync_folder("a")
    assert states(disk) == [
        {"a": None, "a/x": b"1", "b": None},
        {"a": None, "a/x": b"1", "b": None, "b/y": b"2"},
    ]


def test_what_lies_in_a_lost_folder_is_lost_however_well_it_was_synced() -> None:
    disk = made()
    disk.make_folder("a/b")
    write(disk, "a/b/x", b"1")
    disk.sync_folder("a/b")
    disk.sync_folder("a")
    assert states(disk) == [{}, {"a": None, "a/b": None, "a/b/x": b"1"}]


def test_a_deletion_may_be_undone_until_the_folder_is_synced() -> None:
    disk = made()
    disk.make_folder("a")
    write(disk, "a/x", b"1")
    disk.sync_folder("a")
    disk.sync_folder("")
    disk.delete("a/x")
    disk.delete_folder("a")
    assert states(disk) == [{"a": None, "a/x": b"1"}, {"a": None}, {}]
    disk.sync_folder("")
    assert states(disk) == [{}]


def test_a_name_used_twice_may_refer_to_any_of_its_objects() -> None:
    disk = made()
    write(disk, "a", b"first")
    disk.sync_folder("")
    disk.delete("a")
    write(disk, "a", b"second")
    assert states(disk) == [{"a": b"first"}, {}, {"a": b"second"}]


def test_a_put_may_be_any_earlier_version() -> None:
    disk = made()
    for version in (b"1", b"2", b"3"):
        disk.put("a", version)
    found = states(disk)
    for expected in ({}, {"a": b"1"}, {"a": b"2"}, {"a": b"3"}, {"a": b""}):
        assert expected in found


def test_appended_lines_may_lack_any_end_even_in_a_synced_folder() -> None:
    disk = made()
    appender = disk.append("journal")
    appender.append(b"one")
    appender.replace_last(b"two")
    appender.replace_last(b"three")
    disk.sync_folder("")
    found = [state["journal"] for state in states(disk)]
    for expected in (b"", b"one\ntwo\n", b"one\nthree\n"):
        assert expected in found


def test_states_are_all_distinct_and_the_same_for_the_same_seed() -> None:
    disk = made()
    for number in range(12):
        disk.publish(f"published-{number}", bytes([number]))
        disk.create(f"open-{number}").write(memoryview(bytes([number]) * 5000))
    first, again, other = (states(disk, seed=seed, limit=40) for seed in (3, 3, 4))
    assert len(first) > 30
    assert first == again != other


def test_a_sample_holds_the_four_extremes() -> None:
    disk = made()
    expected: Contents = {}
    for number in range(12):
        disk.publish(f"published-{number}", bytes([number]))
        disk.create(f"open-{number}").write(memoryview(bytes([number]) * 10))
        expected |= {f"published-{number}": bytes([number]), f"open-{number}": bytes([number]) * 10}
    found = states(disk, limit=10)
    assert {} in found
    assert expected in found
    assert {path: b"" if path.startswith("open") else data for path, data in expected.items()} in found


def test_the_number_of_states_stays_within_its_limit() -> None:
    disk = made()
    for number in range(200):
        disk.put(f"file-{number}", b"data")
    assert len(list(disk.crash_states(1, 25))) == 25
    with pytest.raises(RequestError):
        disk.crash_states(1, 3)


def test_a_state_is_a_disk_whose_contents_are_durable_and_which_can_be_cut_again() -> None:
    disk = made()
    disk.make_folder("a")
    write(disk, "a/x", b"1")
    kept = list(disk.crash_states(1, 10))[-1]
    assert contents(kept) == {"a": None, "a/x": b"1"}
    with pytest.raises(ObjectExistsError):
        kept.create("a/x")
    kept.publish("a/y", b"2")
    assert states(kept) == [{"a": None, "a/x": b"1"}, {"a": None, "a/x": b"1", "a/y": b"2"}]


def test_later_changes_do_not_show_in_states_asked_for_before() -> None:
    disk = made()
    write(disk, "a", b"1")
    asked = disk.crash_states(1, 10)
    disk.delete("a")
    disk.sync_folder("")
    assert [contents(state) for state in asked] == [{}, {"a": b"1"}]


def test_looking_at_the_states_changes_nothing() -> None:
    disk = made()
    write(disk, "a", b"1")
    for state in disk.crash_states(1, 10):
        state.put("a", b"changed")
    assert contents(disk) == {"a": b"1"}
    assert states(disk) == [{}, {"a": b"1"}]
