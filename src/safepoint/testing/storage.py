"""The obligations of a `Storage`, as tests that any implementation inherits.

Write a class of tests in pytest's style that says how to make one::

    class TestMyStorage(StorageConformance):
        def make_storage(self) -> Storage:
            return MyStorage(...)
"""

from __future__ import annotations

from functools import partial

from safepoint.errors import CorruptionError, ObjectExistsError, ObjectMissingError, RequestError, StorageError
from safepoint.storage.base import Entry, Storage
from safepoint.testing.calls import (
    at_once,
    create_only,
    raises,
    read_when_there,
    reading_verbs,
    verbs_of_a_path,
    verbs_of_an_object,
)

_BAD_PATHS = ["/a", "a/", "a//b", ".", "..", "a/../b", "./a", "a\\b", "a b", "a\n", "a\x00", "ü", "~", "a:b"]
_THREAD_COUNT = 8


class StorageConformance:
    """Check each obligation stated in `safepoint.storage.base`.

    Subclasses define `make_storage`; each test calls it once or more, and needs a storage whose root does not exist.
    """

    def make_storage(self) -> Storage:
        """Return a storage of its own whose root does not exist yet."""
        raise NotImplementedError

    def test_the_root_is_absent_until_it_is_made(self) -> None:
        storage = self.make_storage()
        assert not storage.root_exists()
        assert storage.list("") == []
        with raises(ObjectMissingError):
            storage.read("a", limit_bytes=1)
        with raises(ObjectMissingError):
            storage.create("a")
        storage.delete("a")
        storage.delete_folder("a")
        assert not storage.root_exists()

    def test_making_the_root_twice_keeps_what_is_in_it(self) -> None:
        storage = self._made()
        storage.publish("a", b"kept")
        storage.make_root()
        assert storage.root_exists()
        assert storage.read("a", limit_bytes=4) == b"kept"

    def test_the_url_is_text_and_the_durability_is_a_known_word(self) -> None:
        storage = self.make_storage()
        assert storage.url and (storage.free_bytes() or 0) >= 0
        assert storage.durability in ("process", "power", "replicated")

    def test_every_verb_refuses_paths_outside_the_grammar(self) -> None:
        storage = self._made()
        for path in (*_BAD_PATHS, "x" * 1025):
            for verb in verbs_of_a_path(storage):
                with raises(RequestError):
                    verb(path)

    def test_verbs_of_objects_refuse_the_root(self) -> None:
        storage = self._made()
        for verb in verbs_of_an_object(storage):
            with raises(RequestError):
                verb("")
        with raises(RequestError):
            storage.delete_folder("")

    def test_every_character_of_the_grammar_makes_a_name(self) -> None:
        storage = self._made()
        names = ["-", "...", "0", "A.Z_az-09", "_", ".hidden"]
        for name in names:
            storage.publish(name, name.encode())
        assert [entry.name for entry in storage.list("")] == sorted(names)
        assert [storage.read(name, limit_bytes=9) for name in names] == [name.encode() for name in names]

    def test_a_written_object_reads_back_in_the_order_of_its_writes(self) -> None:
        storage = self._made()
        for size_bytes in (0, 1, 70_010, 1 << 24):
            writer = storage.create(f"object-{size_bytes}", size_bytes=size_bytes)
            for piece in (b"one", b"", b"two", bytes(70_000)):
                writer.write(memoryview(piece))
            writer.write(memoryview(b"wide").cast("I"))
            writer.finish()
            assert storage.read(f"object-{size_bytes}", limit_bytes=70_010) == b"onetwo" + bytes(70_000) + b"wide"
            assert storage.size(f"object-{size_bytes}") == 70_010

    def test_an_object_without_bytes_exists(self) -> None:
        storage = self._made()
        storage.create("written").finish()
        storage.publish("published", b"")
        assert storage.list("") == [Entry("published", False, 0), Entry("written", False, 0)]
        assert storage.read("written", limit_bytes=0) == b""

    def test_a_writer_owns_no_part_of_the_buffer(self) -> None:
        storage = self._made()
        buffer = bytearray(b"first")
        writer = storage.create("object")
        writer.write(memoryview(buffer))
        buffer[:] = b"other"
        writer.finish()
        assert storage.read("object", limit_bytes=5) == b"first"

    def test_a_writer_is_finished_once(self) -> None:
        writer = self._made().create("object")
        writer.finish()
        with raises(RequestError):
            writer.finish()
        with raises(RequestError):
            writer.write(memoryview(b"late"))
        writer.abandon()

    def test_an_abandoned_writer_never_finishes(self) -> None:
        writer = self._made().create("object")
        writer.write(memoryview(b"part"))
        writer.abandon()
        writer.abandon()
        with raises(RequestError):
            writer.finish()

    def test_a_taken_name_is_never_given_again(self) -> None:
        storage = self._made()
        storage.create("created").finish()
        storage.publish("published", b"first")
        for path in ("created", "published"):
            with raises(ObjectExistsError):
                storage.create(path)
            with raises(ObjectExistsError):
                storage.publish(path, b"second")
        assert storage.read("published", limit_bytes=5) == b"first"
        assert storage.size("created") == 0
        assert [entry.name for entry in storage.list("")] == ["created", "published"]

    def test_a_folder_takes_a_name_like_an_object(self) -> None:
        storage = self._made()
        storage.make_folder("taken")
        with raises(ObjectExistsError):
            storage.create("taken")
        with raises(ObjectExistsError):
            storage.publish("taken", b"data")
        with raises(StorageError):
            storage.put("taken", b"data")
        with raises(StorageError):
            storage.append("taken")
        storage.publish("object", b"data")
        with raises(StorageError):
            storage.make_folder("object")
        with raises(StorageError):
            storage.make_folder("object/below")
        assert storage.list("") == [Entry("object", False, 4), Entry("taken", True, 0)]

    def test_nothing_makes_a_folder_by_the_way(self) -> None:
        storage = self._made()
        for verb in (
            storage.create,
            storage.append,
            storage.sync_folder,
            lambda path: storage.publish(path, b""),
            lambda path: storage.put(path, b""),
        ):
            with raises(ObjectMissingError):
                verb("absent/object")
        assert storage.list("") == []

    def test_of_many_threads_that_create_or_publish_one_name_one_wins(self) -> None:
        storage = self._made()
        for path in ("object-1", "object-2", "object-3", "object-4"):
            for verb in (partial(create_only, storage, path), partial(storage.publish, path + "-whole", b"data")):
                outcomes = at_once([verb] * _THREAD_COUNT)
                losers = [outcome for outcome in outcomes if isinstance(outcome, ObjectExistsError)]
                assert len(losers) == _THREAD_COUNT - 1, outcomes

    def test_a_published_object_is_never_seen_in_part(self) -> None:
        storage = self._made()
        contents = [bytes([number]) * 200_000 for number in range(10)]

        def publish_all() -> None:
            for number, content in enumerate(contents):
                storage.publish(f"object-{number}", content)

        def read_all() -> None:
            for number, content in enumerate(contents):
                found = read_when_there(storage, f"object-{number}", len(content))
                assert found == content

        outcomes = at_once([publish_all, read_all, read_all])
        assert outcomes == [None, None, None]

    def test_put_replaces_at_once_and_as_a_whole(self) -> None:
        storage = self._made()
        contents = [bytes([number]) * (1_000 + number) for number in range(100)]
        storage.put("object", contents[0])

        def put_all() -> None:
            for content in contents:
                storage.put("object", content)

        def read_all() -> None:
            for _ in contents:
                assert storage.read("object", limit_bytes=2_000) in contents

        assert at_once([put_all, read_all]) == [None, None]
        assert storage.read("object", limit_bytes=2_000) == contents[-1]
        assert [entry.name for entry in storage.list("")] == ["object"]

    def test_a_read_over_its_limit_is_refused(self) -> None:
        storage = self._made()
        storage.publish("object", b"12345")
        assert storage.read("object", limit_bytes=5) == b"12345"
        with raises(CorruptionError):
            storage.read("object", limit_bytes=4)

    def test_a_range_is_filled_exactly(self) -> None:
        storage = self._made()
        storage.publish("object", bytes(range(100)))
        buffer = bytearray(12)
        storage.read_into("object", 40, memoryview(buffer)[1:11])
        assert buffer == b"\0" + bytes(range(40, 50)) + b"\0"
        storage.read_into("object", 90, memoryview(buffer)[:10])
        assert buffer[:10] == bytes(range(90, 100))
        storage.read_into("object", 100, memoryview(buffer)[:0])
        wide = memoryview(bytearray(8)).cast("I")
        storage.read_into("object", 0, wide)
        assert wide.tobytes() == bytes(range(8))

    def test_a_range_past_the_end_is_refused(self) -> None:
        storage = self._made()
        storage.publish("object", bytes(100))
        for offset, length in ((91, 10), (100, 1), (101, 0), (1 << 40, 1), (0, 101)):
            with raises(CorruptionError):
                storage.read_into("object", offset, memoryview(bytearray(length)))
        with raises(RequestError):
            storage.read_into("object", -1, memoryview(bytearray(1)))

    def test_an_absent_object_is_reported_as_missing(self) -> None:
        storage = self._made()
        storage.make_folder("folder")
        for path in ("absent", "folder/absent", "absent/absent"):
            for verb in reading_verbs(storage):
                with raises(ObjectMissingError):
                    verb(path)

    def test_a_reader_reports_what_stands_in_the_wrong_place_as_damage(self) -> None:
        storage = self._made()
        storage.make_folder("folder")
        storage.publish("object", b"data")
        for path in ("folder", "object/below"):
            for verb in reading_verbs(storage):
                with raises(CorruptionError):
                    verb(path)
        with raises(CorruptionError):
            storage.list("object")

    def test_a_listing_is_sorted_and_shows_one_level(self) -> None:
        storage = self._made()
        storage.make_folder("b/below/deep")
        for path in ("c", "a-1", "a.1", "a", "B", "b/inner", "b/below/x"):
            storage.publish(path, b"12")
        assert storage.list("") == [
            Entry("B", False, 2),
            Entry("a", False, 2),
            Entry("a-1", False, 2),
            Entry("a.1", False, 2),
            Entry("b", True, 0),
            Entry("c", False, 2),
        ]
        assert storage.list("b") == [Entry("below", True, 0), Entry("inner", False, 2)]
        assert storage.list("b/below") == [Entry("deep", True, 0), Entry("x", False, 2)]
        assert storage.list("absent") == storage.list("b/absent/more") == []

    def test_a_listing_shows_what_a_dead_publisher_left(self) -> None:
        storage = self._made()
        storage.create(".tmp-0011").abandon()
        assert [entry.name for entry in storage.list("")] == [".tmp-0011"]

    def test_folders_are_made_with_those_above_and_again(self) -> None:
        storage = self._made()
        storage.make_folder("a/b/c")
        storage.publish("a/b/c/object", b"kept")
        storage.make_folder("a/b/c")
        storage.make_folder("a")
        storage.make_folder("")
        for folder in ("", "a", "a/b", "a/b/c"):
            storage.sync_folder(folder)
        assert storage.read("a/b/c/object", limit_bytes=4) == b"kept"

    def test_deleting_is_idempotent_and_frees_the_name(self) -> None:
        storage = self._made()
        storage.make_folder("folder")
        storage.publish("folder/object", b"first")
        for _ in range(2):
            storage.delete("folder/object")
            storage.delete("absent/object")
        assert storage.list("folder") == []
        storage.publish("folder/object", b"second")
        assert storage.read("folder/object", limit_bytes=6) == b"second"

    def test_delete_never_takes_a_folder_and_delete_folder_never_an_object(self) -> None:
        storage = self._made()
        storage.make_folder("folder")
        storage.publish("object", b"data")
        with raises(StorageError):
            storage.delete("folder")
        with raises(StorageError):
            storage.delete_folder("object")
        assert [entry.name for entry in storage.list("")] == ["folder", "object"]

    def test_only_an_empty_folder_is_deleted(self) -> None:
        storage = self._made()
        storage.make_folder("folder/below")
        with raises(StorageError):
            storage.delete_folder("folder")
        for _ in range(2):
            storage.delete_folder("folder/below")
            storage.delete_folder("folder")
        assert storage.list("") == []

    def test_appended_lines_stay_in_order_also_over_openings(self) -> None:
        storage = self._made()
        for lines in ((b"one", b""), (b"two",)):
            appender = storage.append("journal")
            for line in lines:
                appender.append(line)
            appender.close()
            appender.close()
        assert storage.read("journal", limit_bytes=100) == b"one\n\ntwo\n"

    def test_the_last_line_is_replaced_by_longer_and_shorter_ones(self) -> None:
        storage = self._made()
        appender = storage.append("journal")
        appender.append(b"stays")
        for line in (b"12", b"1234567", b"123", b"", b"abc", b"xyz"):
            appender.replace_last(line)
            assert storage.read("journal", limit_bytes=100) == b"stays\n" + line + b"\n"
        appender.append(b"kept")
        appender.replace_last(b"first")
        appender.replace_last(b"2nd")
        appender.close()
        assert storage.read("journal", limit_bytes=100) == b"stays\nxyz\nkept\n2nd\n"

    def test_the_line_of_an_earlier_opening_is_not_replaced(self) -> None:
        storage = self._made()
        for line in (b"first", b"second"):
            appender = storage.append("journal")
            appender.replace_last(line)
            appender.close()
        assert storage.read("journal", limit_bytes=100) == b"first\nsecond\n"

    def test_a_torn_last_line_is_ended_before_the_next_one(self) -> None:
        storage = self._made()
        storage.put("journal", b"whole\ntor")
        appender = storage.append("journal")
        appender.append(b"next")
        appender.close()
        assert storage.read("journal", limit_bytes=100) == b"whole\ntor\nnext\n"

    def test_a_line_with_a_newline_or_after_the_close_is_refused(self) -> None:
        storage = self._made()
        appender = storage.append("journal")
        for verb in (appender.append, appender.replace_last):
            with raises(RequestError):
                verb(b"two\nlines")
        appender.close()
        with raises(RequestError):
            appender.append(b"late")
        assert storage.read("journal", limit_bytes=100) == b""

    def test_threads_work_on_one_folder_without_disturbing_each_other(self) -> None:
        storage = self._made()

        def work(number: int) -> None:
            storage.make_folder("shared/deep")
            for turn in range(10):
                path = f"shared/deep/{number}-{turn}"
                writer = storage.create(path)
                writer.write(memoryview(path.encode()))
                writer.finish()
                storage.sync_folder("shared/deep")
                assert storage.read(path, limit_bytes=100) == path.encode()
                assert path.rpartition("/")[2] in [entry.name for entry in storage.list("shared/deep")]
                storage.delete(path)

        outcomes = at_once([partial(work, number) for number in range(_THREAD_COUNT)])
        assert outcomes == [None] * _THREAD_COUNT
        assert storage.list("shared/deep") == []

    def _made(self) -> Storage:
        storage = self.make_storage()
        storage.make_root()
        return storage
