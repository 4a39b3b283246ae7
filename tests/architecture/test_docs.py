"""The pages for readers: their Python runs, their links lead somewhere.

The ``python`` blocks of one page are one program, run in order in an empty folder. A block marked ``python no-run``
need only compile. Every other block is text: give it another language, such as ``console`` or ``text``.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.architecture.source import ROOT, broken, shown, tracked_files
from tests.warm import WarmPython

PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")})
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,}) *(?P<language>[^`\n]*)$")
LINK = re.compile(r"!?\[[^\]\n]*\]\((?P<target>[^)\s]+)(?:\s+\"[^\"]*\")?\)")
FOREIGN = re.compile(r"^[a-z][a-z0-9+.-]*:")
RUN, COMPILE = "python", "python no-run"
PROGRAMS = [page for page in PAGES if re.search(rf"^ *[`~]+ *{RUN}$", page.read_text(encoding="utf-8"), re.MULTILINE)]
# Spellings that a reader takes for Python and this test would not run.
EVASIONS = re.compile(r"^(py|py3|python3|pycon|ipython)\b|^python(?! no-run$)\b.+|^Python\b")


@dataclass(frozen=True, slots=True)
class Block:
    """Hold one fenced block: its language, the line its text begins on (counted from 1), and the text."""

    language: str
    line: int
    text: str


def test_there_are_pages_to_check() -> None:
    names = {shown(page) for page in PAGES}
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/index.md"} <= names


@pytest.mark.parametrize("page", PROGRAMS, ids=shown)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, warm_python: WarmPython) -> None:
    script = tmp_path / "page.py"
    script.write_text(program([block for block in blocks(page) if block.language == RUN]), encoding="utf-8")
    folder = tmp_path / "work"
    folder.mkdir()
    ended = warm_python.run(script, folder=folder, logs=tmp_path)
    assert ended.returncode == 0, f"the Python of {shown(page)} fails; line numbers are the page's\n{ended.errors}"


def test_a_page_whose_python_fails_is_told_with_its_line(tmp_path: Path, warm_python: WarmPython) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A\n\n```python\nimport safepoint\nsafepoint.no_such_name\n```\n")
    script = tmp_path / "page.py"
    script.write_text(program(blocks(page)))
    ended = warm_python.run(script, folder=tmp_path, logs=tmp_path)
    assert ended.returncode == 1
    assert "line 5" in ended.errors and "no_such_name" in ended.errors


def test_python_that_is_not_run_compiles() -> None:
    for page in PAGES:
        for block in blocks(page):
            if block.language == COMPILE:
                compile("\n" * (block.line - 1) + block.text, shown(page), "exec")


def test_every_block_names_its_language() -> None:
    def unnamed(page: Path) -> Iterator[str]:
        for block in blocks(page):
            if not block.language or EVASIONS.match(block.language):
                yield f"{block.line}: {block.language or 'no language'!r}; write {RUN!r}, {COMPILE!r}, or what it is"

    wrong = broken(unnamed, PAGES)
    assert not wrong, wrong


def test_links_to_files_and_headings_lead_somewhere() -> None:
    tracked = set(tracked_files()) | set(PAGES)
    there = tracked | {parent for path in tracked for parent in path.parents}

    def astray(page: Path) -> Iterator[str]:
        for line, target in links(page):
            path, _, heading = target.partition("#")
            found = (page.parent / path).resolve() if path else page
            if FOREIGN.match(target):
                continue
            if found not in there:
                yield f"{line}: no file {target}"
            elif heading and found.suffix == ".md" and heading not in headings(found):
                yield f"{line}: no heading #{heading} in {shown(found)}"

    wrong = broken(astray, PAGES)
    assert not wrong, wrong


def test_blocks_keep_the_line_numbers_of_their_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A\n\n```python\nx = 1\n```\n\n- b\n\n  ```python\n  if x:\n      y = 2\n  ```\n\n```text\n1/0\n```\n"
    )
    first, second, third = blocks(page)
    assert (first.line, second.line, third.language) == (4, 10, "text")
    assert program([first, second]).splitlines()[3] == "x = 1"
    assert program([first, second]).splitlines()[9:11] == ["if x:", "    y = 2"]


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order. A fence that is never closed is an error."""
    found: list[Block] = []
    opened: re.Match[str] | None = None
    start, text = 0, list[str]()
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        fence = FENCE.match(line)
        if opened is None:
            if fence:
                opened, start, text = fence, number + 1, []
        elif fence and not fence["language"] and fence["ticks"].startswith(opened["ticks"]):
            found.append(Block(opened["language"].strip(), start, textwrap.dedent("\n".join(text)) + "\n"))
            opened = None
        else:
            text.append(line)
    assert opened is None, f"{page}:{start - 1}: this block is never closed"
    return found


def program(parts: list[Block]) -> str:
    """Return the blocks as one program in which each statement stands on the line that it has on the page."""
    lines: list[str] = []
    for part in parts:
        lines += [""] * (part.line - 1 - len(lines))
        lines += part.text.splitlines()
    return "\n".join(lines) + "\n"


def links(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and target of each link outside blocks and inline code."""
    for number, line in prose(page):
        # The text of a link may itself be code, so only code that holds a whole link is taken out.
        for match in LINK.finditer(re.sub(r"`[^`]*\]\([^`]*`", "", line)):
            yield number, match["target"]


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    anchors: set[str] = set()
    for _, line in prose(page):
        if match := re.match(r"^#{1,6} +(.+?) *#*$", line):
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", match[1]).replace("`", "")
            slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
            repeats = next(n for n in range(1000) if (f"{slug}-{n}" if n else slug) not in anchors)
            anchors.add(f"{slug}-{repeats}" if repeats else slug)
    return anchors


def prose(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page that lie outside fenced blocks, with their numbers."""
    opened: str | None = None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        fence = FENCE.match(line)
        if opened is None and fence:
            opened = fence["ticks"]
        elif opened is not None:
            if fence and not fence["language"] and fence["ticks"].startswith(opened):
                opened = None
        else:
            yield number, line
