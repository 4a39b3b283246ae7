"""How candidates take turns, and how their rounds are compared."""

from __future__ import annotations

from harness.document import Target, parse_size
from harness.rounds import Candidate, Series, interleave


def test_each_round_begins_with_the_next_candidate_and_warm_ups_are_not_kept() -> None:
    played: list[str] = []

    def made(name: str) -> Candidate:
        return Candidate(
            name,
            lambda: played.append(name) or {"turn": float(len(played))},
            before=lambda: played.append("before"),
            after=lambda: played.append("after"),
        )

    series = interleave([made("a"), made("b"), made("c")], rounds=3)

    names = [word for word in played if word in "abc"]
    assert "".join(names) == "cab" + "abc" + "bca" + "cab"
    assert played[:3] == ["before", "c", "after"]
    assert len(series.of("turn", "a")) == 3


def test_one_round_is_kept_where_there_is_no_time_and_only_whole_rounds_are() -> None:
    series = interleave([Candidate(name, lambda: {"turn": 1.0}) for name in "ab"], rounds=5, seconds=0.0)
    assert (series.of("turn", "a"), series.of("turn", "b"), series.rounds) == ([1.0], [1.0], 1)


def test_ratios_are_taken_round_by_round() -> None:
    series = Series()
    for ours, theirs in ((1.0, 2.0), (4.0, 4.0), (2.0, 1.0)):
        series.add("ours", {"seconds": ours})
        series.add("theirs", {"seconds": theirs})
    assert series.quotient("seconds", "theirs", "ours") == [2.0, 1.0, 0.5]
    assert series.best("seconds", ["ours", "theirs", "absent"]) in ("ours", "theirs")


def test_a_target_is_met_by_its_median_and_never_without_values() -> None:
    floor = Target("row", "ratio", 1.4, True, [1.0, 1.5, 9.0]).document()
    assert (floor["median"], floor["min"], floor["max"], floor["met"]) == (1.5, 1.0, 9.0, True)
    assert not Target("row", "ratio", 1.4, False, [1.0, 1.5, 9.0]).document()["met"]
    absent = Target("row", "ratio", 0.1, False, (), note="why").document()
    assert (absent["median"], absent["met"], absent["note"]) == (None, False, "why")


def test_sizes_are_read_as_they_are_written() -> None:
    assert [parse_size(text) for text in ("64MiB", "1g", "4096", "1.5kb")] == [64 << 20, 1 << 30, 4096, 1536]
