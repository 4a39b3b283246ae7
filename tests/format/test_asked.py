"""How a checkpoint is asked for: by its step, or by the name of its generation."""

from __future__ import annotations

import pytest

from safepoint.errors import RequestError
from safepoint.format.asked import as_argument, asked_of, fits, is_asked_text, parse_asked, step_of, told
from safepoint.format.names import GenerationName

TEXT = "step-000000000030-i000002-0badcafe"
NAME = GenerationName(30, 2, "0badcafe")
TWIN = GenerationName(30, 1, "0badcafe")


def test_a_step_fits_all_of_that_step_and_a_name_one_generation() -> None:
    assert [fits(name, 30) for name in (NAME, TWIN, GenerationName(31, 2, "0badcafe"))] == [True, True, False]
    assert [fits(name, NAME) for name in (NAME, TWIN)] == [True, False]
    assert fits(NAME, None)


def test_what_is_typed_and_what_a_caller_writes_ask_for_the_same() -> None:
    assert (parse_asked("30"), parse_asked("030"), parse_asked(TEXT)) == (30, 30, NAME)
    assert (asked_of(30), asked_of(TEXT)) == (30, NAME)
    assert (as_argument(30), as_argument(NAME)) == (30, TEXT)
    assert (step_of(30), step_of(NAME)) == (30, 30)
    assert (told(30), told(NAME)) == ("step 30", f"the generation {TEXT}")


@pytest.mark.parametrize("text", ["", "latest", "-1", "٣", "step-30", TEXT + "0", "9" * 19])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(RequestError):
        parse_asked(text)
    assert is_asked_text(text) == (text == "9" * 19)


@pytest.mark.parametrize("step", [-1, True, 1.0, "30", "latest", None])
def test_other_arguments_are_refused(step: object) -> None:
    with pytest.raises(RequestError):
        asked_of(step)
