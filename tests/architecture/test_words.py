"""Words and names that stand nowhere in the repository.

Each pattern holds a class of one letter, so that this file does not match itself.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.architecture.source import ROOT, shown, tracked_files

FORBIDDEN_NAMES = frozenset(
    {"util", "utils", "helper", "helpers", "common", "misc", "core", "handler", "handlers", "stuff", "temp", "tmp"}
)

FORBIDDEN_WORDS = {
    "a path of one machine": r"/(wor[k]|roo[t]|hom[e]/\w+|opt/whee[l]s|opt/pyp[i]|Use[r]s/\w+)/",
    "the host of a package registry": (
        r"\b(pyp[i]\.org|pythonhoste[d]\.org|npmj[s]\.(org|com)|de[b]\.debian\.org|downloa[d]\.pytorch\.org"
        r"|prox[y]\.golang\.org|crate[s]\.io|rubygem[s]\.org)\b"
    ),
    "work left undone": r"\b(TOD[O]|FIXM[E]|XX[X]|HAC[K])\b",
    "a reference outside the repository": (
        r"\b(design pag[e]s?|issue #?\d[\d]*|house styl[e] \d|rule \d+ of the hous[e])\b|shared/(desig[n]|case[s])"
    ),
    "praise": (
        r"\b(seamles[s]|effortles[s]|blazin[g]|lightning-fas[t]|world-clas[s]|cutting-edg[e]|battle-teste[d]"
        r"|state-of-the-ar[t]|game-change[r]|production-grad[e])"
    ),
}


def test_no_file_or_folder_has_a_name_that_says_nothing() -> None:
    wrong = [
        shown(path)
        for path in tracked_files()
        if FORBIDDEN_NAMES & {part.split(".")[0] for part in path.relative_to(ROOT).parts}
    ]
    assert not wrong, "name a file by its noun or its phase:\n" + "\n".join(wrong)


def test_no_forbidden_word_stands_in_a_file() -> None:
    patterns = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in FORBIDDEN_WORDS.items()}
    patterns["work left undone"] = re.compile(FORBIDDEN_WORDS["work left undone"])
    wrong = [
        f"{shown(path)}:{number}: {kind}: {match[0]}"
        for path in tracked_files()
        for number, line in enumerate(text_lines(path), start=1)
        for kind, pattern in patterns.items()
        if (match := pattern.search(line))
    ]
    assert not wrong, "\n".join(wrong)


def text_lines(path: Path) -> list[str]:
    """Return the lines of a text file; a file with a zero byte or with bytes that are not UTF-8 is not text."""
    data = path.read_bytes()
    if b"\0" in data:
        return []
    try:
        return data.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        return []
