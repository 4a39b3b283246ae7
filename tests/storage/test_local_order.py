"""In which order local storage calls the system, and what a killed process leaves: seen from outside of it."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import safepoint
from safepoint.errors import ObjectMissingError
from safepoint.storage.local import LocalStorage

TEMPORARY = ".tmp-5afe"
SOURCE = str(Path(safepoint.__file__).parents[1])

PROGRAM = """
import sys
from safepoint.storage.local import LocalStorage

class FixedToken:
    def token(self, byte_count):
        return "5afe"

storage = LocalStorage(sys.argv[1], ambient=FixedToken())
"""
PUBLISH = PROGRAM + 'storage.publish("object", bytes(range(256)) * 400)\n'
FINISH = PROGRAM + 'w = storage.create("object"); w.write(memoryview(b"data")); w.finish(); storage.sync_folder("")\n'
PUBLISH_MANY = PROGRAM + (
    "for number in range(100000):\n    storage.publish(f'object-{number}', bytes([number % 256]) * 300_000)\n"
)
WHOLE = bytes(range(256)) * 400
CALLS = "openat,write,pwrite64,fsync,fdatasync,ftruncate,close,link,linkat,rename,renameat,renameat2,unlink,unlinkat"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    LocalStorage(tmp_path / "run").make_root()
    return tmp_path / "run"


def trace(root: Path, program: str, *options: str) -> tuple[int, str]:
    """Run a program under strace, and return its exit code and the calls that touched the root."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    log = root.parent / "calls"
    paths = [option for name in ("", TEMPORARY, "object") for option in ("-P", str(root / name) if name else str(root))]
    command = ["strace", "-f", "-y", "-o", str(log), "-e", f"trace={CALLS}", *paths, *options]
    answer = subprocess.run(
        [*command, sys.executable, "-c", program, str(root)],
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "PTRACE" in answer.stderr:
        pytest.skip(f"strace may not trace here: {answer.stderr.strip()[:200]}")
    return answer.returncode, log.read_text()


def steps(calls: str, root: Path) -> list[tuple[str, str]]:
    """Return (call, object) for each call of a log: what it made, wrote, synced, named or removed."""
    found = []
    for line in calls.splitlines():
        match = re.search(r"^\d+ +(\w+)\((.*)\) += +\d+", line)
        if match is None:
            continue
        call, arguments = match.groups()
        if call in ("write", "pwrite64", "fsync", "close", "ftruncate"):
            path = re.search(r"<(.*?)>", arguments)
            subject = os.path.relpath(path[1], root) if path else ""
        else:
            subject = "->".join(re.findall(r'"(.*?)"', arguments))
            call += "+O_EXCL" if "O_EXCL" in arguments else ""
        found.append((call, subject.replace(str(root), ".")))
    return found


def test_publish_writes_syncs_and_only_then_gives_the_name(root: Path) -> None:
    """Spec: F6.1."""
    code, calls = trace(root, PUBLISH)
    assert code == 0
    assert steps(calls, root) == [
        ("openat", "."),
        ("openat+O_EXCL", TEMPORARY),
        ("write", TEMPORARY),
        ("fsync", TEMPORARY),
        ("close", TEMPORARY),
        ("linkat", f"{TEMPORARY}->object"),
        ("unlinkat", TEMPORARY),
        ("close", "."),
    ]


def test_finish_syncs_after_the_last_write_and_sync_folder_syncs_the_folder(root: Path) -> None:
    code, calls = trace(root, FINISH)
    assert code == 0
    assert steps(calls, root) == [
        ("openat", "."),
        ("openat+O_EXCL", "object"),
        ("close", "."),
        ("pwrite64", "object"),
        ("fsync", "object"),
        ("close", "object"),
        ("openat", "."),
        ("fsync", "."),
        ("close", "."),
    ]


@pytest.mark.parametrize(
    ("call", "number", "allowed"),
    [
        ("openat", 1, {None}),
        ("openat", 2, {None}),
        ("write", 1, {None}),
        ("fsync", 1, {None}),
        ("close", 1, {None}),
        ("linkat", 1, {None, WHOLE}),
        ("unlinkat", 1, {WHOLE}),
    ],
)
def test_a_kill_at_any_call_of_publish_leaves_nothing_or_the_whole(
    root: Path, call: str, number: int, allowed: set[bytes | None]
) -> None:
    code, calls = trace(root, PUBLISH, "-e", f"inject={call}:signal=SIGKILL:when={number}")
    assert code in (-signal.SIGKILL, 128 + signal.SIGKILL), calls
    storage = LocalStorage(root)
    assert object_or_nothing(storage) in allowed
    assert {entry.name for entry in storage.list("")} <= {TEMPORARY, "object"}


def test_kills_at_random_moments_leave_whole_objects_only(root: Path, chance: random.Random) -> None:
    for round_number in range(4):
        storage = LocalStorage(root / str(round_number))
        storage.make_root()
        command = [sys.executable, "-c", PUBLISH_MANY, str(root / str(round_number))]
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": SOURCE})
        try:
            wait_for(storage, f"object-{chance.randrange(1, 60)}", process)
        finally:
            process.kill()
            process.wait(60)
        entries = [entry for entry in storage.list("") if not entry.name.startswith(".tmp-")]
        assert len(entries) > 1
        for entry in entries:
            fill = int(entry.name.removeprefix("object-")) % 256
            assert storage.read(entry.name, limit_bytes=300_000) == bytes([fill]) * 300_000


def object_or_nothing(storage: LocalStorage) -> bytes | None:
    try:
        return storage.read("object", limit_bytes=len(WHOLE))
    except ObjectMissingError:
        return None


def wait_for(storage: LocalStorage, path: str, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            storage.size(path)
            return
        except ObjectMissingError:
            continue
    raise AssertionError(f"the program ended by itself with {process.returncode}")
