"""The reference pages are complete: every name, option, code, word and page stands where a reader looks for it."""

from __future__ import annotations

import re

import pytest
import typer

import safepoint
import safepoint.data
import safepoint.errors
from safepoint.cli.entry import make_app
from safepoint.contract import WORDS
from safepoint.drill.plan import PHASES
from safepoint.drill.verdict import Verdict
from safepoint.errors import SafepointError
from tests.architecture.source import ROOT, shown

DOCS = ROOT / "docs"
ERRORS = [one for one in vars(safepoint.errors).values() if isinstance(one, type) and issubclass(one, SafepointError)]


def page(path: str) -> str:
    return (DOCS / path).read_text(encoding="utf-8")


def code_in(text: str) -> set[str]:
    """Return every word that stands in inline code, without what follows an opening bracket."""
    spans = re.findall(r"`([^`\n]+)`", text)
    return {word for span in spans for word in span.split("(")[0].split(" ")}


@pytest.mark.parametrize("names", [safepoint.__all__, safepoint.data.__all__], ids=["safepoint", "safepoint.data"])
def test_every_public_name_stands_in_the_reference(names: list[str]) -> None:
    assert not set(names) - code_in(page("reference/api.md"))


def test_every_method_of_the_manager_stands_in_the_reference() -> None:
    methods = {f".{name}" for name in vars(safepoint.CheckpointManager) if not name.startswith("_")}
    assert not methods - code_in(page("reference/api.md"))


def test_every_command_and_option_stands_in_the_reference() -> None:
    text = page("reference/cli.md")
    application = typer.main.get_command(make_app())
    assert isinstance(application, typer.core.TyperGroup)
    assert set(re.findall(r"^## (\w+)$", text, re.MULTILINE)) == set(application.commands)
    parameters = [one for command in application.commands.values() for one in command.params] + application.params
    options = {name for one in parameters for name in (*one.opts, *one.secondary_opts) if name.startswith("--")}
    assert not options - code_in(text)


def test_every_error_stands_in_the_reference_with_its_codes() -> None:
    text = page("reference/errors.md")
    for error in ERRORS:
        assert f"`{error.__name__}`" in text and f"`{error.code}`" in text
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| `(\w+)` \| (\d+) \|", text, re.MULTILINE)
    public = [error for error in ERRORS if error.__name__ in safepoint.__all__]
    assert sorted(rows) == sorted((error.__name__, error.code, str(error.exit_code)) for error in public)


def test_every_exit_code_of_an_error_stands_in_the_reference() -> None:
    told = set(re.findall(r"^\| (\d+) \|", page("reference/cli.md"), re.MULTILINE))
    assert {str(error.exit_code) for error in ERRORS} <= told


def test_every_word_of_a_contract_stands_in_the_reference() -> None:
    text = page("reference/permits.md")
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == WORDS


def test_every_phase_and_verdict_of_a_drill_is_told() -> None:
    told = code_in(page("how-to/rehearse-a-failure.md"))
    assert not {*PHASES, *(verdict.value for verdict in Verdict)} - told


def test_the_index_lists_every_page() -> None:
    listed = {(DOCS / target).resolve() for target in re.findall(r"\]\(([^)#]+)\)", page("index.md"))}
    pages = set(DOCS.rglob("*.md")) - {DOCS / "index.md"}
    assert not [shown(path) for path in sorted(pages - listed)]
