"""Messages for people: bounded, whatever a file holds."""

from __future__ import annotations

from safepoint.errors import CorruptionError, Difference, MismatchError

LONG = "a" * 10**6


def test_a_message_does_not_repeat_a_long_text_and_the_facts_keep_it() -> None:
    """A file of a run may hold any text, and what is wrong with it goes to a terminal and to every rank."""
    differences = [Difference("model.added", "a parameter", LONG, "absent")]
    for error in (
        CorruptionError("a record cannot be decoded", expected=LONG, found=LONG),
        MismatchError("the checkpoint does not fit", differences=differences),
    ):
        assert len(str(error)) < 25_000
        assert "(1000000 letters)" in str(error)
    assert CorruptionError("a record cannot be decoded", found=LONG).found == LONG
