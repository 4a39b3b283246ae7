"""How long a file and a function may be, and how deep a block may lie."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.source import ROOT, broken, nodes, package_files

LINES_OF_A_FILE = 400
LINES_OF_A_FUNCTION = 70
# The style asks for three; a fourth level is left to judgement, a fifth is not.
LEVELS_OF_A_FUNCTION = 4

FOLDERS = ("tests", "examples", "benchmarks")
FILES = package_files() + sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

Function = ast.FunctionDef | ast.AsyncFunctionDef
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)


def test_a_file_fits_in_its_limit() -> None:
    def too_long(path: Path) -> Iterator[str]:
        count = len(path.read_text(encoding="utf-8").splitlines())
        if count > LINES_OF_A_FILE:
            yield f"{count}: this file has {count} lines, more than {LINES_OF_A_FILE}"

    wrong = broken(too_long, FILES)
    assert not wrong, wrong


def test_a_function_fits_in_its_limit() -> None:
    """Decorators and docstring count: a reader has to read them too."""

    def too_long(path: Path) -> Iterator[str]:
        for function in functions(path):
            if (lines := length(function)) > LINES_OF_A_FUNCTION:
                yield f"{function.lineno}: {function.name} has {lines} lines, more than {LINES_OF_A_FUNCTION}"

    wrong = broken(too_long, FILES)
    assert not wrong, wrong


def test_a_function_is_not_deeply_nested() -> None:
    def too_deep(path: Path) -> Iterator[str]:
        for function in functions(path):
            if (levels := depth(function.body)) > LEVELS_OF_A_FUNCTION:
                yield f"{function.lineno}: {function.name} nests {levels} levels, more than {LEVELS_OF_A_FUNCTION}"

    wrong = broken(too_deep, FILES)
    assert not wrong, wrong


def test_depth_counts_blocks_and_not_the_branches_of_one_choice() -> None:
    chain = "if a:\n  pass\nelif b:\n  pass\nelse:\n  for x in y:\n    pass\n"
    assert depth(ast.parse(chain).body) == 2
    assert depth(ast.parse("try:\n  pass\nexcept A:\n  with b:\n    if c:\n      pass\n").body) == 3


def functions(path: Path) -> Iterator[Function]:
    return (node for node in nodes(path) if isinstance(node, Function))


def length(function: Function) -> int:
    first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
    assert function.end_lineno is not None
    return function.end_lineno - first + 1


def depth(body: list[ast.stmt]) -> int:
    """Return how many blocks lie in one another. A function inside a function is measured by itself."""
    return max((_depth_of(statement) for statement in body), default=0)


def _depth_of(statement: ast.stmt) -> int:
    if not isinstance(statement, BLOCKS):
        return 0
    if isinstance(statement, ast.If) and len(statement.orelse) == 1 and isinstance(statement.orelse[0], ast.If):
        # An elif stands beside its if, not inside it.
        return max(1 + depth(statement.body), _depth_of(statement.orelse[0]))
    return 1 + max(depth(part) for part in _parts(statement))


def _parts(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    yield getattr(statement, "body", [])
    yield getattr(statement, "orelse", [])
    yield getattr(statement, "finalbody", [])
    for branch in [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]:
        yield branch.body
