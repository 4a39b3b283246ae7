"""Switch off each defence by itself, in a copy, and see that the tests named for it fail.

A test that passed all the same would be no proof of the defence, and a defence without such a test might be lost.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.defences import copied, passing
from tests.crash.defences_of_reading import READING
from tests.crash.defences_of_writing import WRITING

CASES = (*WRITING, *READING)
DEFENCES = {
    "file fsync",
    "folder fsync",
    "fsync before rename",
    "exclusive create",
    "read-back",
    "size check",
    "digest check",
    "tiling",
    "lineage",
    "tombstone",
    "ballot",
    "incarnation",
}
(SAMPLE,) = (case for case in CASES if case.name == "ballot: of another generation")


def test_each_defence_has_places_and_each_place_is_still_there() -> None:
    assert {case.defence for case in CASES} == DEFENCES
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        case.check_matches()


def test_a_defence_that_is_switched_off_is_noticed(tmp_path: Path) -> None:
    copy = copied(tmp_path)
    SAMPLE.switch_off(copy)
    assert passing(copy, *SAMPLE.tests) == []


@pytest.mark.soak
def test_each_place_of_a_defence_that_is_switched_off_is_noticed(tmp_path: Path) -> None:
    copy = copied(tmp_path)
    tests = sorted({test for case in CASES for test in case.tests})
    assert passing(copy, *tests) == tests, "some fail without a cause"
    unnoticed = {}
    for case in CASES:
        case.switch_off(copy)
        unnoticed[case.name] = passing(copy, *case.tests)
        case.switch_on(copy)
        print(f"switched off {case.name}: {len(case.tests)} tests fail, {len(unnoticed[case.name])} do not", flush=True)
    assert not any(unnoticed.values()), {name: left for name, left in unnoticed.items() if left}
