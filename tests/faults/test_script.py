"""Scripts of faults, and what each effect does to a storage."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from safepoint.errors import ObjectMissingError, OutcomeUnknownError, StorageError
from safepoint.faults.script import VERBS, Effect, Fault, FaultScript, SimulatedCrash, random_script
from safepoint.faults.storage import FaultyStorage
from safepoint.storage.memory import MemoryStorage

DATA = bytes(range(256)) * 4


def made(*faults: Fault, seed: int = 7) -> tuple[MemoryStorage, FaultyStorage]:
    inner = MemoryStorage()
    inner.make_root()
    inner.publish("there", DATA)
    return inner, FaultyStorage(inner, FaultScript(faults, seed))


def names(storage: MemoryStorage) -> list[str]:
    return [entry.name for entry in storage.list("")]


def test_every_verb_is_logged_in_order_with_its_path() -> None:
    _, storage = made()
    storage.root_exists()
    storage.make_root()
    storage.make_folder("a/b")
    writer = storage.create("a/x")
    writer.write(memoryview(b"12"))
    writer.finish()
    storage.sync_folder("a")
    storage.publish("a/p", b"")
    storage.put("a/q", b"")
    appender = storage.append("a/j")
    appender.append(b"")
    appender.replace_last(b"")
    appender.close()
    storage.read("a/x", limit_bytes=9)
    storage.read_into("a/x", 0, memoryview(bytearray(1)))
    storage.size("a/x")
    storage.list("a")
    storage.delete("a/x")
    storage.delete_folder("a/b")
    writer.abandon()
    paths = ["", "", "a/b", "a/x", "a/x", "a/x", "a", "a/p", "a/q", "a/j", "a/j", "a/j"]
    paths += ["a/x", "a/x", "a/x", "a", "a/x", "a/b"]
    verbs = "root_exists make_root make_folder create write finish sync_folder publish put append append_line"
    verbs += " replace_line read read_into size list delete delete_folder"
    assert storage.operations == list(zip(range(18), verbs.split(), paths, strict=True))
    assert {verb for _, verb, _ in storage.operations} == set(VERBS)


def test_a_failing_verb_does_nothing_and_names_the_error_number() -> None:
    inner, storage = made(Fault(Effect.FAIL, verb="publish", path="records/*.json", errno=errno.ENOSPC))
    storage.make_folder("records")
    storage.publish("there-too", b"other path")
    with pytest.raises(StorageError, match="disk is full") as caught:
        storage.publish("records/1.json", b"data")
    assert caught.value.errno == errno.ENOSPC
    assert inner.list("records") == []
    storage.publish("records/1.json", b"data")
    assert storage.fired == [(2, storage.fired[0][1])]


@pytest.mark.parametrize("verb", sorted(set(VERBS)))
def test_every_verb_can_fail_once(verb: str) -> None:
    _, storage = made(Fault(Effect.FAIL, verb=verb))
    with pytest.raises(StorageError):
        run_everything(storage)
    assert [number for number, _ in storage.fired] == [len(storage.operations) - 1]
    assert storage.operations[-1][1] == verb


@pytest.mark.parametrize("verb", sorted(set(VERBS)))
def test_every_verb_can_be_the_last_of_a_process(verb: str) -> None:
    inner, storage = made(Fault(Effect.STOP, verb=verb))
    with pytest.raises(SimulatedCrash):
        run_everything(storage)
    before = {entry.name: entry for entry in inner.list("")}
    with pytest.raises(SimulatedCrash):
        storage.delete("there")
    with pytest.raises(SimulatedCrash):
        storage.put("late", b"")
    assert {entry.name: entry for entry in inner.list("")} == before


def test_a_failing_write_stores_a_part_and_the_writer_never_finishes() -> None:
    inner, storage = made(Fault(Effect.FAIL, verb="write", errno=errno.ENOSPC))
    writer = storage.create("new")
    with pytest.raises(StorageError, match="disk is full"):
        writer.write(memoryview(DATA))
    with pytest.raises(StorageError):
        writer.finish()
    with pytest.raises(StorageError):
        writer.write(memoryview(DATA))
    stored = inner.read("new", limit_bytes=len(DATA))
    assert len(stored) < len(DATA)
    assert DATA.startswith(stored)


def test_a_failed_finish_is_final() -> None:
    _, storage = made(Fault(Effect.FAIL, verb="finish"))
    writer = storage.create("new")
    for _ in range(2):
        with pytest.raises(StorageError):
            writer.finish()


def test_a_cut_publish_reports_success_and_names_a_part() -> None:
    inner, storage = made(Fault(Effect.CUT_SHORT, verb="publish"))
    storage.publish("new", DATA)
    stored = inner.read("new", limit_bytes=len(DATA))
    assert len(stored) < len(DATA)
    assert DATA.startswith(stored)


def test_cut_reads_report_less_than_there_is() -> None:
    _, storage = made(Fault(Effect.CUT_SHORT, lasts=True))
    assert len(storage.read("there", limit_bytes=len(DATA))) < len(DATA)
    assert storage.size("there") < len(DATA)
    assert storage.list("") == []
    buffer = bytearray(len(DATA))
    storage.read_into("there", 0, memoryview(buffer))
    beginning = bytes(buffer).rstrip(b"\0")
    assert beginning != DATA
    assert DATA.startswith(beginning)


@pytest.mark.parametrize(
    "act",
    [
        lambda storage: storage.read("there", limit_bytes=len(DATA)),
        lambda storage: read_range(storage, "there", len(DATA)),
        lambda storage: written(storage, lambda: storage.publish("new", DATA)),
        lambda storage: written(storage, lambda: storage.put("new", DATA)),
        lambda storage: written(storage, lambda: write(storage, "new", DATA)),
    ],
    ids=["read", "read_into", "publish", "put", "write"],
)
def test_exactly_one_bit_is_flipped_and_the_seed_says_which(act: Callable[[FaultyStorage], bytes]) -> None:
    results = []
    for seed in (7, 7, 8):
        _, storage = made(Fault(Effect.FLIP_BIT), seed=seed)
        results.append(act(storage))
        difference = int.from_bytes(results[-1], "big") ^ int.from_bytes(DATA, "big")
        assert bin(difference).count("1") == 1
    assert results[0] == results[1] != results[2]


def test_a_lost_answer_leaves_the_work_done() -> None:
    inner, storage = made(Fault(Effect.LOSE_ANSWER, lasts=True))
    with pytest.raises(OutcomeUnknownError):
        storage.publish("new", b"data")
    with pytest.raises(StorageError) as caught:
        storage.put("put", b"data")
    assert caught.value.retryable
    with pytest.raises(StorageError):
        storage.create("created")
    assert names(inner) == ["created", "new", "put", "there"]


def test_a_publisher_that_dies_leaves_at_most_a_temporary_object() -> None:
    left = set()
    for seed in range(20):
        inner, storage = made(Fault(Effect.STOP, verb="publish"), seed=seed)
        with pytest.raises(SimulatedCrash):
            storage.publish("new", DATA)
        assert "new" not in names(inner)
        left.add(tuple(name[:5] for name in names(inner)))
    assert left == {("there",), (".tmp-", "there")}


def test_a_simulated_crash_passes_by_handlers_of_exceptions() -> None:
    assert not issubclass(SimulatedCrash, Exception)


def test_a_fault_happens_at_its_operation_once_or_from_then_on() -> None:
    _, once = made(Fault(Effect.FAIL, operation=2))
    assert [fails(lambda: once.size("there")) for _ in range(5)] == [False, False, True, False, False]
    _, lasting = made(Fault(Effect.FAIL, operation=2, lasts=True))
    assert [fails(lambda: lasting.size("there")) for _ in range(5)] == [False, False, True, True, True]


def test_a_fault_spares_as_many_occurrences_as_it_says() -> None:
    _, storage = made(Fault(Effect.FAIL, verb="size", occurrence=2))
    storage.list("")
    assert [fails(lambda: storage.size("there")) for _ in range(4)] == [False, False, True, False]


def test_faults_spare_operations_that_cannot_suffer_them() -> None:
    _, storage = made(Fault(Effect.FLIP_BIT), Fault(Effect.CUT_SHORT, verb="create"))
    storage.sync_folder("")
    storage.create("new").finish()
    assert storage.fired == []


def test_a_script_prints_as_python_that_makes_it_again() -> None:
    script = FaultScript((Fault(Effect.FAIL, operation=3, errno=errno.EIO, lasts=True), Fault(Effect.STOP)), seed=5)
    known = {"FaultScript": FaultScript, "Fault": Fault, "Effect": Effect}
    assert eval(repr(script), known) == script
    assert str(script) == (
        "seed 5: fail with EIO at operation 3 of '*' on '*' from then on; stop at match 0 of '*' on '*'"
    )


def test_the_same_seed_gives_the_same_random_script() -> None:
    scripts = [random_script(seed, operation_count=50) for seed in range(100)]
    assert scripts == [random_script(seed, operation_count=50) for seed in range(100)]
    assert len(set(scripts)) > 90
    assert {fault.effect for script in scripts for fault in script.faults} == set(Effect)
    # Written down once, so that a seed noted today replays the same script on any machine and version.
    assert str(random_script(1, operation_count=50)) == (
        "seed 1: lose the answer at operation 30 of '*' on '*' from then on; flip a bit at operation 29 of '*' on '*'"
    )


def run_everything(storage: FaultyStorage) -> None:
    storage.root_exists()
    storage.make_root()
    storage.make_folder("a")
    storage.sync_folder("")
    write(storage, "new", DATA)
    storage.publish("record", DATA)
    storage.put("alive", DATA)
    appender = storage.append("journal")
    appender.append(b"line")
    appender.replace_last(b"line")
    appender.close()
    storage.read("there", limit_bytes=len(DATA))
    read_range(storage, "there", len(DATA))
    storage.size("there")
    storage.list("")
    storage.delete("new")
    storage.delete_folder("a")


def write(storage: FaultyStorage, path: str, data: bytes) -> None:
    writer = storage.create(path)
    writer.write(memoryview(data))
    writer.finish()


def read_range(storage: FaultyStorage, path: str, length: int) -> bytes:
    buffer = bytearray(length)
    storage.read_into(path, 0, memoryview(buffer))
    return bytes(buffer)


def written(storage: FaultyStorage, act: Callable[[], None]) -> bytes:
    act()
    return storage.read("new", limit_bytes=len(DATA))


def fails(act: Callable[[], object]) -> bool:
    try:
        act()
    except ObjectMissingError:
        raise
    except StorageError:
        return True
    return False
