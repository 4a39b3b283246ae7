"""Damage every file of a run in every way: what is restored is right, or the damage is named."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from safepoint.errors import CorruptionError, NotFoundError, RequestError, SafepointError
from safepoint.restoring.outcome import RestoreReport
from safepoint.restoring.select import Wish, check_run_is_there
from safepoint.storage.local import LocalStorage
from safepoint.storage.memory import MemoryStorage
from safepoint.testing.ambient import FakeWorld
from tests.crash.damage import Files, files_of, judge, needed_by, small_run, start_on, storage_of
from tests.crash.job import Job, check_state_is_told, newest_step, whole_state

RUN = small_run()
PATHS = sorted(RUN)
BYTES = [(path, offset) for path in PATHS for offset in range(len(RUN[path]))]


def flipped(path: str, offset: int, bit: int) -> Files:
    data = bytearray(RUN[path])
    data[offset] ^= 1 << bit
    return {**RUN, path: bytes(data)}


def check_one(path: str, data: bytes | None) -> RestoreReport:
    """Start where one file holds other bytes, or is gone, and check that only what needs that file is not restored."""
    files = {other: RUN[other] for other in PATHS if other != path} | ({} if data is None else {path: data})
    report = judge(files, path)
    assert report is not None
    assert report.step == (40 if path in needed_by(50, RUN) else 50)
    return report


def test_the_sound_run_is_restored_at_its_newest_step() -> None:
    outcome = start_on(storage_of(RUN))
    assert outcome.report is not None
    assert (outcome.report.step, outcome.report.refused) == (50, ())
    assert outcome.job.state() == whole_state(50)


def test_a_flipped_bit_is_harmless_or_named(chance: random.Random) -> None:
    """Spec: C10.2, C11.2, F2.2, F3.10"""
    sample = [(path, chance.randrange(len(RUN[path]))) for path in PATHS for _ in range(4)]
    flip_each(sample + chance.sample(BYTES, 60), chance)


@pytest.mark.soak
def test_a_flipped_bit_of_any_byte_is_harmless_or_named(chance: random.Random) -> None:
    """Spec: C10.2, C11.2, F2.2, F3.10"""
    flip_each(BYTES, chance)


def flip_each(places: list[tuple[str, int]], chance: random.Random) -> None:
    for path, offset in places:
        check_one(path, flipped(path, offset, chance.randrange(8))[path])
    print(f"counted: {len(places)} flipped bits")


def cuts(path: str, chance: random.Random) -> Iterator[int]:
    """Yield lengths: none, one, all but one, the ends of header and lines, and some others."""
    length = len(RUN[path])
    yield from {0, 1, length // 2, length - 1, min(4096, length - 1), *(chance.randrange(length) for _ in range(4))}


def test_a_truncated_or_emptied_file_is_harmless_or_named(chance: random.Random) -> None:
    """Spec: C10.2, F2.7"""
    places = [(path, length) for path in PATHS for length in cuts(path, chance)]
    for path, length in places:
        check_one(path, RUN[path][:length])
    print(f"counted: {len(places)} truncated files")


@pytest.mark.parametrize("path", PATHS)
def test_a_file_with_more_bytes_than_it_had_is_harmless_or_named(path: str) -> None:
    """Spec: C8.1"""
    for longer in (RUN[path] + b" ", RUN[path] * 2):
        check_one(path, longer)


@pytest.mark.parametrize("path", PATHS)
def test_a_removed_file_is_harmless_or_named(path: str) -> None:
    """Spec: C9.5, C10.2"""
    report = check_one(path, None)
    if path in needed_by(50, RUN):
        assert f"generations/{report.refused[0].generation}/{report.refused[0].file}" == path


def test_a_removed_manifest_is_told_from_a_save_that_was_never_completed() -> None:
    (path,) = (path for path in needed_by(50, RUN) if path.endswith("manifest.json"))
    files = {other: data for other, data in RUN.items() if other != path}
    report = start_on(storage_of(files)).report
    assert report is not None
    assert "the journal says it was committed" in report.refused[0].reason
    unfinished = {other: data for other, data in files.items() if not other.startswith("journal/")}
    report = start_on(storage_of(unfinished)).report
    assert report is not None
    assert "never completed" in report.refused[0].reason


def test_a_newest_generation_that_is_gone_is_reported() -> None:
    files = {path: data for path, data in RUN.items() if path not in needed_by(50, RUN)}
    outcome = start_on(storage_of(files))
    assert outcome.report is not None
    assert outcome.report.step == 40
    assert [int(entry.generation[5:17]) for entry in outcome.report.refused] == [50]
    assert "journal" in outcome.report.refused[0].reason


def swaps() -> list[tuple[str, str]]:
    return list(itertools.combinations(PATHS, 2))


@pytest.mark.parametrize("number", range(8))
def test_two_files_that_changed_places_are_harmless_or_named(number: int) -> None:
    """Spec: F6.3, C10.2"""
    pairs = [(one, other) for one, other in swaps()[number::8] if RUN[one] != RUN[other]]
    for one, other in pairs:
        judge({**RUN, one: RUN[other], other: RUN[one]}, one, other)
    print(f"counted: {len(pairs)} exchanges of two files")


def test_a_file_in_the_place_of_another_is_harmless_or_named(chance: random.Random) -> None:
    for one, other in chance.sample(list(itertools.permutations(PATHS, 2)), 120):
        judge({**RUN, one: RUN[other]}, one)


def test_a_start_that_resumed_and_lost_its_record_is_not_passed_over() -> None:
    """A start that went back on purpose and did not save yet: without its record the branch that was left would win.

    Spec: C9.5
    """
    storage = storage_of(RUN)
    job = Job(storage, FakeWorld(states={1: "gone", 2: "gone"}), pid=3)
    assert job.start(Wish(30, branch=True)).step == 30
    job.end()
    files = files_of(storage)
    record = "incarnations/000003.resumed.json"
    for damaged in ({path: data for path, data in files.items() if path != record}, {**files, record: b""}):
        outcome = start_on(storage_of(damaged))
        assert outcome.report is None
        assert record in outcome.error
    again = Job(storage_of(damaged), FakeWorld(states={number: "gone" for number in (1, 2, 3)}), pid=5)
    assert again.start(Wish(30, branch=True)).step == 30
    assert again.state() == whole_state(30)


@pytest.mark.parametrize("kind", ["manifest.json", "rank-00000-of-00001.json", ".safetensors"])
@pytest.mark.parametrize("way", ["flip", "empty", "remove"])
def test_a_run_whose_checkpoints_are_all_damaged_is_never_begun_anew(kind: str, way: str) -> None:
    """Spec: C10.3"""
    files = dict(RUN)
    hit = [path for path in PATHS if path.endswith(kind)]
    for path in hit:
        if way == "remove":
            del files[path]
        else:
            files[path] = b"" if way == "empty" else RUN[path][:-1] + bytes([RUN[path][-1] ^ 1])
    storage = storage_of(files)
    outcome = start_on(storage)
    assert outcome.report is None
    for step in (30, 40, 50):
        (path,) = (path for path in hit if path in needed_by(step, RUN))
        assert path.removeprefix("generations/") in outcome.error
    assert "no checkpoint of the run can be used" in outcome.error
    # Only damage among the tensors is found after the live bytes were written to.
    assert ("mixture" in outcome.error) == (kind == ".safetensors" and way == "flip")
    job = Job(storage, FakeWorld(states={1: "gone", 2: "gone", 3: "gone"}), pid=4)
    with pytest.raises((CorruptionError, RequestError)):
        job.train_to(1)


def test_a_run_whose_folders_of_checkpoints_are_all_gone_is_never_begun_anew() -> None:
    """Spec: C10.3"""
    outcome = start_on(storage_of({path: data for path, data in RUN.items() if not path.startswith("generations/")}))
    assert outcome.report is None
    assert "according to the journal" in outcome.error


def test_an_empty_place_is_a_fresh_start_that_says_so() -> None:
    """Spec: C10.4"""
    report = start_on(MemoryStorage()).report
    assert report is not None
    assert report.is_fresh
    assert "fresh start" in str(report)


@pytest.mark.parametrize("wish", [Wish(50), Wish(required=True), Wish(50, branch=True)])
def test_a_misspelt_path_is_not_found_and_not_created(wish: Wish, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Spec: C1.7, C10.4"""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.raises(NotFoundError) as caught:
        check_run_is_there(LocalStorage(folder / "runn"), wish)
    assert "runn" in str(caught.value)
    assert list(folder.iterdir()) == []


def test_a_step_that_is_not_there_is_not_found() -> None:
    """Spec: C10.4"""
    job = Job(storage_of(RUN), FakeWorld(states={1: "gone", 2: "gone"}), pid=3)
    with pytest.raises(NotFoundError, match="step 35"):
        job.start(Wish(35))


def test_a_save_after_a_fallback_is_found(chance: random.Random) -> None:
    for path in sorted(needed_by(50, RUN)):
        storage = storage_of(flipped(path, chance.randrange(len(RUN[path])), 0))
        outcome = start_on(storage)
        outcome.job.live(41)
        assert newest_step(storage) == 41


def test_damage_to_two_files_at_once_is_harmless_or_a_typed_error(chance: random.Random) -> None:
    """Two hits may take a record and what it is rebuilt from; then the error need not name both."""
    for _ in range(150):
        files = dict(RUN)
        for path in chance.sample(PATHS, 2):
            files[path] = chance.choice([b"", RUN[path][: len(RUN[path]) // 2], RUN[chance.choice(PATHS)]])
        job = Job(storage_of(files), FakeWorld(states={1: "gone", 2: "gone"}), pid=3)
        try:
            report = job.start()
        except SafepointError as exc:
            check_state_is_told(job, exc)
            continue
        assert report.step in (20, 30, 40, 50)
        assert job.state() == whole_state(report.step)
