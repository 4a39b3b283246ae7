"""What a test may not do: sleep its time away, or be left out without saying why."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.source import ROOT, broken, called_name, dotted, nodes

LONGEST_SLEEP_S = 1.0
SKIPS = frozenset({"pytest.skip", "pytest.xfail", "pytest.mark.skip", "pytest.mark.skipif", "pytest.mark.xfail"})

FILES = sorted((ROOT / "tests").rglob("*.py"))


def test_a_test_polls_shortly_instead_of_sleeping() -> None:
    def sleeps(path: Path) -> Iterator[str]:
        for call in calls(path):
            if called_name(call) in {"time.sleep", "sleep"} and not _is_short(call):
                yield f"{call.lineno}: sleeps for {ast.unparse(call.args[0]) if call.args else '?'}"

    wrong = broken(sleeps, FILES)
    assert not wrong, wrong


def test_a_test_that_is_left_out_says_why() -> None:
    def silent(path: Path) -> Iterator[str]:
        called = {id(call.func) for call in calls(path)}
        for call in calls(path):
            if called_name(call) in SKIPS and not _has_reason(call):
                yield f"{call.lineno}: {called_name(call)} gives no reason"
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and dotted(node) in SKIPS and id(node) not in called:
                yield f"{node.lineno}: {dotted(node)} gives no reason"

    wrong = broken(silent, FILES)
    assert not wrong, wrong


def calls(path: Path) -> list[ast.Call]:
    return [node for node in nodes(path) if isinstance(node, ast.Call)]


def _is_short(call: ast.Call) -> bool:
    """Return whether a sleep is known to end soon; one whose length is computed is not."""
    if not call.args or not isinstance(call.args[0], ast.Constant):
        return False
    length = call.args[0].value
    return isinstance(length, int | float) and length < LONGEST_SLEEP_S


def _has_reason(call: ast.Call) -> bool:
    given = [keyword.value for keyword in call.keywords if keyword.arg == "reason"]
    if called_name(call) in {"pytest.skip", "pytest.xfail", "pytest.mark.skip"}:
        given += call.args[:1]
    return any(not (isinstance(reason, ast.Constant) and not reason.value) for reason in given)
