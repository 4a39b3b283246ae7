"""Memory of a process of its own, watched from outside: what a save or a restore takes beyond the state.

The watched process says ``ready`` when its state stands, does one thing for each line that it is sent, and answers
``done``. What counts is memory that is not a file's: of the process, and of those that it started. Memory that several
share counts once.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

_INTERVAL_S = 0.002
_END_S = 60
READY, DONE, GO, END = "ready", "done", "go", "end"


def serve(act: Callable[[], object]) -> None:
    """In the watched process: say that the state stands, then act once for each line."""
    print(READY, flush=True)
    for line in sys.stdin:
        if line.strip() != GO:
            break
        act()
        print(DONE, flush=True)


def watch(script: Path, arguments: Iterable[str], *, rounds: int) -> list[int]:
    """Start a script, let it act so often, and return the greatest memory of each time beyond what it had when ready.

    Raises:
        RuntimeError: The script ended by itself.
    """
    process = subprocess.Popen(
        [sys.executable, str(script), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        _expect(process, READY)
        before = held_bytes(process.pid)
        found = [_greatest(process) - before for _ in range(rounds)]
        process.stdin.write(END + "\n")
        process.stdin.close()
        process.wait(timeout=_END_S)
    finally:
        process.kill()
    if process.returncode != 0:
        raise RuntimeError(f"{script.name} ended with {process.returncode}")
    return found


def held_bytes(pid: int) -> int:
    """Return the memory of a process and of those that it started, without what belongs to files."""
    own, shared = 0, 0
    for one in (pid, *_descendants(pid)):
        fields = _status(one)
        own += fields.get("RssAnon", 0)
        shared = max(shared, fields.get("RssShmem", 0))
    return (own + shared) << 10


def _greatest(process: subprocess.Popen[str]) -> int:
    process.stdin.write(GO + "\n")
    process.stdin.flush()
    answer = threading.Thread(target=_expect, args=(process, DONE))
    answer.start()
    greatest = 0
    while answer.is_alive():
        greatest = max(greatest, held_bytes(process.pid))
        answer.join(_INTERVAL_S)
    if process.poll() is not None:
        raise RuntimeError(f"the watched process ended with {process.returncode}")
    return greatest


def _expect(process: subprocess.Popen[str], word: str) -> None:
    for line in process.stdout:
        if line.strip() == word:
            return
    raise RuntimeError(f"the watched process ended without saying {word!r}")


def _descendants(pid: int) -> Iterable[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in _text(task / "children").split():
            yield int(child)
            yield from _descendants(int(child))


def _status(pid: int) -> dict[str, int]:
    """Return the fields of a process that count kibibytes."""
    found = {}
    for line in _text(Path(f"/proc/{pid}/status")).splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            found[name] = int(value.split()[0])
    return found


def _text(path: Path) -> str:
    """Return what a file of /proc says; nothing where the process has ended."""
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return ""
