"""Every obligation of the specification is tested, and every citation leads to a clause.

A clause of ``docs/spec/v1.md`` is a paragraph that begins with its number, ``**F4.2**``; it ends before the next clause
or heading. A test cites it in a docstring or comment: the word "Spec", a colon, and numbers parted by commas.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.source import ROOT, package_files, shown

SPEC = ROOT / "docs" / "spec" / "v1.md"
CLAUSE = re.compile(r"^(?:[-*] +)?\*\*(?P<number>[FC]\d+(?:\.\d+)+)\*\*", re.MULTILINE)
BREAK = re.compile(r"^#{1,6} ", re.MULTILINE)
MUST = re.compile(r"\bMUST\b")
NUMBER = re.compile(r"[FC]\d+(?:\.\d+)*")
CITATION = re.compile(r"\bSpec: *(?P<numbers>[FC]\d+(?:\.\d+)*(?:,\s*[FC]\d+(?:\.\d+)*)*)")


def test_every_must_is_cited_by_a_test() -> None:
    duties = {number for number, text in clauses().items() if MUST.search(text)}
    assert duties, "the specification obliges nobody to anything"
    cited = {number for _, number in citations(cases())}
    missing = sorted(duties - cited, key=_order)
    assert not missing, f"{len(missing)} of {len(duties)} MUST clauses are cited by no test: {', '.join(missing)}"


def test_every_citation_leads_to_a_clause() -> None:
    known = set(clauses())
    sections = {number.rsplit(".", depth)[0] for number in known for depth in range(1, number.count(".") + 1)}
    wrong = [
        f"{place}: there is no {number}"
        for place, number in citations([*cases(), *package_files()])
        if number not in known | sections
    ]
    assert not wrong, "\n".join(wrong)


def test_every_must_stands_in_a_numbered_clause() -> None:
    """What stands before the first clause explains the words and binds nobody."""
    text = SPEC.read_text(encoding="utf-8")
    first = CLAUSE.search(text)
    assert first is not None
    loose = []
    for heading in BREAK.finditer(text, first.start()):
        clause = CLAUSE.search(text, heading.start())
        following = BREAK.search(text, heading.end())
        end = min(found.start() if found else len(text) for found in (clause, following))
        if MUST.search(text, heading.start(), end):
            loose.append(
                f"line {text.count(chr(10), 0, heading.start()) + 1}: a MUST without a number follows this heading"
            )
    assert not loose, "\n".join(loose)


def test_clauses_end_before_the_next_clause_or_heading() -> None:
    text = (
        "MUST is a word\n**F1.1** A writer MUST a.\n\n- more\n**F1.2** It may.\n# Next\nMUST\n- **C10.2** MUST NOT b\n"
    )
    assert _clauses(text) == {
        "F1.1": "**F1.1** A writer MUST a.\n\n- more\n",
        "F1.2": "**F1.2** It may.\n",
        "C10.2": "- **C10.2** MUST NOT b\n",
    }


def clauses() -> dict[str, str]:
    """Return the text of each clause by its number; a number given twice is an error."""
    return _clauses(SPEC.read_text(encoding="utf-8"))


def cases() -> list[Path]:
    """Return the files whose citations count: every test but those about the code itself."""
    own = Path(__file__).parent
    return sorted(path for path in (ROOT / "tests").rglob("test_*.py") if own not in path.parents)


def citations(files: list[Path]) -> Iterator[tuple[str, str]]:
    """Yield the place and number of each citation in a comment or a string."""
    for path in files:
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
        prose = (token for token in tokens if token.type in {tokenize.COMMENT, tokenize.STRING})
        for token in prose:
            for match in CITATION.finditer(token.string):
                yield from ((f"{shown(path)}:{token.start[0]}", number) for number in NUMBER.findall(match["numbers"]))


def _clauses(text: str) -> dict[str, str]:
    starts = list(CLAUSE.finditer(text))
    numbers = [match["number"] for match in starts]
    assert len(numbers) == len(set(numbers)), f"given twice: {sorted({n for n in numbers if numbers.count(n) > 1})}"
    ends = sorted([match.start() for match in starts] + [match.start() for match in BREAK.finditer(text)] + [len(text)])
    return {match["number"]: text[match.start() : next(end for end in ends if end > match.start())] for match in starts}


def _order(number: str) -> tuple[str, list[int]]:
    return number[0], [int(part) for part in number[1:].split(".")]
