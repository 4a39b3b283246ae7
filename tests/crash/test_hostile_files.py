"""Files that were made to harm: pickles, paths that lead out of the run, links, and sizes beyond all memory."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from safepoint.errors import SafepointError
from safepoint.format.digest import digest_bytes
from safepoint.storage.local import LocalStorage
from safepoint.testing.ambient import FakeWorld
from tests.crash.damage import Files, judge, needed_by, small_run, start_on, storage_of
from tests.crash.job import Job, whole_state
from tests.crash.processes import SOURCE

RUN = small_run()
PATHS = sorted(RUN)
HUGE = 10**15
(MANIFEST,) = (path for path in needed_by(50, RUN) if path.endswith("manifest.json"))
(INDEX,) = (path for path in needed_by(50, RUN) if path.endswith("of-00001.json"))
(DATA,) = (path for path in needed_by(50, RUN) if path.endswith(".safetensors"))
FOLDER = MANIFEST.rpartition("/")[0]


class Bomb:
    """Make a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.marker,)


def resealed(data: bytes, old: str, new: str) -> bytes:
    """Return a record in which a text is replaced and the digest is made right again, as an attacker would."""
    text = data.decode()
    assert old in text
    tail = text[43:].replace(old, new)
    return b'{"digest":"' + digest_bytes(tail.encode()).encode() + tail.encode()


def laid_out(files: Files, root: Path) -> LocalStorage:
    """Write files below a root."""
    for path, data in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return LocalStorage(root)


def steps_refused(outcome: object) -> list[int]:
    report = getattr(outcome, "report", None)
    assert report is not None, getattr(outcome, "error", "")
    return [int(entry.generation[5:17]) for entry in report.refused]


def test_the_bomb_of_these_tests_goes_off(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("protocol", [0, 4])
def test_a_pickle_in_any_place_is_never_run(tmp_path: Path, protocol: int) -> None:
    """Spec: C11.4, F2.7"""
    bomb = pickle.dumps(Bomb(tmp_path / "marker"), protocol)
    for path in PATHS:
        judge({**RUN, path: bomb}, path)
        judge({**RUN, path: RUN[path][:43] + bomb}, path)
    assert not (tmp_path / "marker").exists()


def test_pickles_beside_the_files_of_a_run_are_never_run(tmp_path: Path) -> None:
    """Spec: C11.4, F5.4"""
    bomb = pickle.dumps(Bomb(tmp_path / "marker"))
    folders = sorted({path.rpartition("/")[0] for path in PATHS})
    names = ("state.pkl", "data.pt", "rank-00001-of-00001.safetensors", ".metadata", "__init__.py", "model.bin")
    extra = {f"{folder}/{name}".lstrip("/"): bomb for folder in folders for name in names}
    outcome = start_on(storage_of({**extra, **RUN}))
    assert outcome.report is not None
    assert outcome.report.step == 50
    assert not (tmp_path / "marker").exists()


def test_a_plain_value_cannot_name_code() -> None:
    """Spec: F4.5, C11.4"""
    old = re.search(r'"plain": (\{[^}]*\})', RUN[INDEX].decode())
    assert old is not None
    for tag in ("$pickle", "$object", "$class", "$reduce", "$import", "__reduce__"):
        tree = json.dumps({tag: ["os", "mkdir", ["marker"]]})
        hostile = resealed(RUN[INDEX], old[0], f'"plain": {tree}')
        manifest = with_index(RUN[MANIFEST], hostile)
        assert steps_refused(start_on(storage_of({**RUN, INDEX: hostile, MANIFEST: manifest}))) == [50]


def test_an_index_that_says_the_same_in_other_bytes_is_not_the_one_that_the_manifest_names() -> None:
    """Spec: F3.10, F7.4"""
    other = resealed(RUN[INDEX], '"rank": 0', '"rank":0 ')
    assert len(other) == len(RUN[INDEX])
    assert steps_refused(start_on(storage_of({**RUN, INDEX: other}))) == [50]


def with_index(manifest: bytes, index: bytes) -> bytes:
    """Return a manifest that names this index instead of its own."""
    old = RUN[INDEX]
    named = resealed(manifest, digest_bytes(old), digest_bytes(index))
    return resealed(named, f'"size_bytes": {len(old)}', f'"size_bytes": {len(index)}')


@pytest.mark.parametrize(
    "name", ["../../../secret", "/etc/passwd", "..", ".", "a/b", "", "rank-00000-of-00001.safetensors/x"]
)
def test_names_that_lead_out_of_a_generation_are_refused(name: str) -> None:
    """Spec: F3.7, F5.4, F7.2"""
    data_name = DATA.rpartition("/")[2]
    for old in (data_name, INDEX.rpartition("/")[2]):
        hostile = resealed(RUN[MANIFEST], f'"name": "{old}"', f'"name": "{name}"')
        assert steps_refused(start_on(storage_of({**RUN, MANIFEST: hostile}))) == [50]
    index = resealed(RUN[INDEX], f'"name": "{data_name}"', f'"name": "{name}"')
    files = {**RUN, INDEX: index, MANIFEST: with_index(RUN[MANIFEST], index)}
    assert steps_refused(start_on(storage_of(files))) == [50]


@pytest.mark.parametrize("generation", ["../../elsewhere", "/tmp", "..", "step-000000000060-i000002-00000000", ""])
def test_generations_that_lead_out_of_the_run_are_refused(generation: str) -> None:
    """Spec: C13.1, C9.1, F7.2"""
    own = FOLDER.rpartition("/")[2]
    hostile = resealed(RUN[MANIFEST], f'"generation": "{own}"', f'"generation": "{generation}"')
    assert steps_refused(start_on(storage_of({**RUN, MANIFEST: hostile}))) == [50]
    record = "incarnations/000002.resumed.json"
    resumed = re.search(r'"resumed": "(step-[^"]*)"', RUN[record].decode())
    assert resumed is not None
    judge({**RUN, record: resealed(RUN[record], resumed[1], generation)}, record)


def test_a_link_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    """What the link leads to is sound, so only the link itself can be the reason."""
    for path in sorted(needed_by(50, RUN)):
        root = tmp_path / path.rpartition("/")[2]
        storage = laid_out(RUN, root)
        (root / path).rename(root.parent / "outside")
        (root / path).symlink_to(root.parent / "outside")
        outcome = start_on(storage)
        assert steps_refused(outcome) == [50]
        assert outcome.job.state() == whole_state(40)


def test_a_link_in_the_place_of_a_generations_folder_is_refused(tmp_path: Path) -> None:
    storage = laid_out(RUN, tmp_path / "run")
    (tmp_path / "run" / FOLDER).rename(tmp_path / FOLDER.rpartition("/")[2])
    (tmp_path / "run" / FOLDER).symlink_to(tmp_path / FOLDER.rpartition("/")[2])
    outcome = start_on(storage)
    assert steps_refused(outcome) == [50]
    assert outcome.job.state() == whole_state(40)


@pytest.mark.parametrize("folder", ["generations", "incarnations", "journal"])
def test_a_link_in_the_place_of_a_runs_folder_is_refused(tmp_path: Path, folder: str) -> None:
    storage = laid_out(RUN, tmp_path / "run")
    (tmp_path / "run" / folder).rename(tmp_path / "outside")
    (tmp_path / "run" / folder).symlink_to(tmp_path / "outside")
    before = sorted(path.name for path in (tmp_path / "outside").iterdir())
    try:
        report = start_on(storage).report
    except SafepointError as exc:
        assert folder in str(exc)
        report = None
    assert report is None or (folder == "journal" and report.step == 50)
    assert sorted(path.name for path in (tmp_path / "outside").iterdir()) == before


@pytest.mark.parametrize("kind", ["device", "pipe", "folder"])
def test_what_is_no_file_in_the_place_of_one_is_refused(tmp_path: Path, kind: str) -> None:
    for path in sorted(needed_by(50, RUN)):
        root = tmp_path / path.rpartition("/")[2]
        storage = laid_out(RUN, root)
        (root / path).unlink()
        if kind == "pipe":
            os.mkfifo(root / path)
        elif kind == "folder":
            (root / path).mkdir()
        else:
            (root / path).symlink_to("/dev/zero")
        assert steps_refused(start_on(storage)) == [50]


def hostile_sizes() -> dict[str, Files]:
    """Return runs in which the newest checkpoint states 10^15 bytes somewhere, with every digest right."""
    size_bytes = len(RUN[DATA])
    found = {}
    manifest = resealed(RUN[MANIFEST], f'"size_bytes": {size_bytes}', f'"size_bytes": {HUGE}')
    found["manifest"] = {**RUN, MANIFEST: manifest}
    found["items"] = {**RUN, MANIFEST: resealed(RUN[MANIFEST], '"size_bytes": 300', f'"size_bytes": {HUGE}')}
    manifest = resealed(RUN[MANIFEST], f'"size_bytes": {len(RUN[INDEX])}', f'"size_bytes": {HUGE}')
    found["index size"] = {**RUN, MANIFEST: manifest}
    for name, old, new in (
        ("header", '"header_bytes": 4096', f'"header_bytes": {HUGE}'),
        ("object", f'"size_bytes": {size_bytes}', f'"size_bytes": {HUGE}'),
        ("chunk", '"size_bytes": 300', f'"size_bytes": {HUGE}'),
        ("offset", '"offset_bytes": 4096', f'"offset_bytes": {HUGE}'),
        ("shape", "300", f"{HUGE}"),
    ):
        index = resealed(RUN[INDEX], old, new)
        found[name] = {**RUN, INDEX: index, MANIFEST: with_index(RUN[MANIFEST], index)}
    data = HUGE.to_bytes(8, "little") + RUN[DATA][8:]
    found["safetensors"] = {**RUN, DATA: data}
    return found


PROGRAM = textwrap.dedent(
    """
    import resource, sys
    from pathlib import Path
    from safepoint.storage.local import LocalStorage
    from tests.crash.damage import start_on
    from tests.crash.job import whole_state

    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    for root in sorted(Path(sys.argv[1]).iterdir()):
        outcome = start_on(LocalStorage(root))
        assert outcome.report is not None, outcome.error
        steps = [int(entry.generation[5:17]) for entry in outcome.report.refused]
        sound = outcome.job.state() == whole_state(outcome.report.step)
        print(root.name, steps, outcome.report.step, sound)
    """
)


def run_program(program: str, *arguments: object) -> str:
    answer = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_a_size_beyond_all_memory_is_refused_without_allocating(tmp_path: Path) -> None:
    """In a process that may have 1 GiB: an attempt to take the memory would end in MemoryError.

    Spec: F2.6, F3.8, F3.9, C11.1
    """
    for name, files in hostile_sizes().items():
        laid_out(files, tmp_path / name.replace(" ", "-"))
    # What an item states of its size serves people alone, so that run is restored; no memory follows from it.
    expected = {name.replace(" ", "-"): "[] 50 True" if name == "items" else "[50] 40 True" for name in hostile_sizes()}
    lines = run_program(PROGRAM, tmp_path).splitlines()
    assert dict(line.split(" ", 1) for line in lines) == expected


def test_an_endless_record_is_refused_by_its_size(tmp_path: Path) -> None:
    """Spec: F2.5, F2.6"""
    for name, path in (("manifest", MANIFEST), ("index", INDEX)):
        laid_out(RUN, tmp_path / "runs" / name)
        os.truncate(tmp_path / "runs" / name / path, 10**12)
    lines = run_program(PROGRAM, tmp_path / "runs").splitlines()
    assert lines == ["index [50] 40 True", "manifest [50] 40 True"]


def test_a_restore_does_not_import_what_defined_the_state(tmp_path: Path) -> None:
    """Save in a process whose item's class lives in a module of its own; load where there is no such module.

    Spec: C11.4
    """
    (tmp_path / "mine.py").write_text("from tests.crash.job import Weights\nclass Mine(Weights): pass\n")
    prepare = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import mine; from pathlib import Path; from tests.crash.processes import own_job\n"
    )
    save = (
        prepare
        + "job = own_job(Path(sys.argv[1]) / 'run')\n"
        + "job.weights[:] = [mine.Mine('first'), mine.Mine('second')]\n"
        + "job.items.update({item.name: item for item in job.weights})\n"
        + "job.start(); job.live(10); job.end()\n"
    )
    run_program(save, tmp_path)
    (tmp_path / "mine.py").unlink()
    shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
    storage = LocalStorage(tmp_path / "run")
    job = Job(storage, FakeWorld(), pid=9)
    assert job.start().step == 10
    assert job.state() == whole_state(10)


def test_records_of_another_run_in_the_folder_are_refused() -> None:
    """Spec: F6.6"""
    other = small_run_of_another_id()
    for path in ("run.json", "incarnations/000001.json", "incarnations/000002.resumed.json"):
        outcome = start_on(storage_of({**RUN, path: other[path]}))
        assert outcome.report is None
        assert "different runs" in outcome.error
    outcome = start_on(storage_of({**RUN, MANIFEST: other[MANIFEST]}))
    assert steps_refused(outcome) == [50]


def small_run_of_another_id() -> Files:
    run = json.loads(RUN["run.json"])["run"]
    return {path: resealed(data, run, "f" * len(run)) for path, data in RUN.items() if run.encode() in data}
