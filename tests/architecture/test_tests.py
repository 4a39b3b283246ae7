"""What a test may not do: sleep its time away, or be left out without saying why."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.architecture.source import ROOT, called_name, dotted, parse, shown

LONGEST_SLEEP_S = 1.0
SKIPS = frozenset({"pytest.skip", "pytest.xfail", "pytest.mark.skip", "pytest.mark.skipif", "pytest.mark.xfail"})

FILES = sorted((ROOT / "tests").rglob("*.py"))
every_file = pytest.mark.parametrize("path", FILES, ids=shown)


@every_file
def test_a_test_polls_shortly_instead_of_sleeping(path: Path) -> None:
    wrong = [
        f"{shown(path)}:{call.lineno}: sleeps for {ast.unparse(call.args[0]) if call.args else '?'}"
        for call in calls(path)
        if called_name(call) in {"time.sleep", "sleep"} and not _is_short(call)
    ]
    assert not wrong, "\n".join(wrong)


@every_file
def test_a_test_that_is_left_out_says_why(path: Path) -> None:
    wrong = [
        f"{shown(path)}:{call.lineno}: {called_name(call)} gives no reason"
        for call in calls(path)
        if called_name(call) in SKIPS and not _has_reason(call)
    ]
    called = {id(call.func) for call in calls(path)}
    wrong += [
        f"{shown(path)}:{node.lineno}: {dotted(node)} gives no reason"
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute) and dotted(node) in SKIPS and id(node) not in called
    ]
    assert not wrong, "\n".join(wrong)


def calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(parse(path)) if isinstance(node, ast.Call)]


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
