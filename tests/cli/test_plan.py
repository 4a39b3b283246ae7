"""``safepoint plan``: what it answers, where its numbers come from, and how it refuses what makes no sense."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from safepoint.cli import main
from safepoint.cli.quantities import rate, size_bytes
from safepoint.duration import duration_s, duration_text
from safepoint.errors import RequestError
from safepoint.format.records import LineageLink
from safepoint.storage.local import LocalStorage
from tests.build import begin, write_generation, write_incarnation

SOURCE = Path(__file__).resolve().parents[2] / "src"
EXAMPLE = ("--save", "1m", "--restore", "4m", "--interval", "20m", "--since-save", "17m")


def answer(capsys: pytest.CaptureFixture[str], *words: str | Path) -> dict[str, Any]:
    code = main(["plan", *map(str, words), "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    found = json.loads(captured.out)
    assert isinstance(found, dict)
    return found


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 2
    return capsys.readouterr().err


def test_the_interval_includes_the_save_where_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Saves every 20 minutes that take one each; a failure 17 minutes after the last one; a restore of 4 minutes."""
    found = answer(capsys, *EXAMPLE, "--interval-includes-save")
    assert found["interval_includes_save"] is True
    assert found["incident"] == {"lost_s": 17 * 60, "delay_s": 4 * 60, "behind_s": 21 * 60}
    assert found["forecast"]["half_interval_s"] == 10 * 60
    assert found["forecast"]["overhead"] == 1 / 20
    assert (found["forecast"]["period_s"], found["forecast"]["work_s"]) == (20 * 60, 19 * 60)


def test_else_it_excludes_the_save_and_the_numbers_are_others(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, *EXAMPLE)
    assert found["interval_includes_save"] is False
    assert found["incident"] == {"lost_s": 17 * 60, "delay_s": 4 * 60, "behind_s": 21 * 60}
    assert found["forecast"]["half_interval_s"] == 10.5 * 60
    assert found["forecast"]["overhead"] == 1 / 21


def test_the_convention_and_every_number_are_told_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *EXAMPLE, "--interval-includes-save", "--mtbf", "6h"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "20 min (typed), which includes the time of the save: 19 min of work, a save every 20 min" in text
    assert "5.00%, 1 in 20 of the time" in text
    assert "by the rule of half the interval 10 min" in text
    assert "lost 17 min delay 4 min behind in all 21 min" in text
    # sqrt(2 * 1 * 360) and one more for the save.
    assert "Young 27.8 min" in text


def test_without_a_rate_of_failures_there_is_no_best_interval(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, *EXAMPLE)
    assert (found["optimum"], found["simulated_optimum"], found["intervals"]) == (None, None, [])
    assert found["forecast"]["shares"] is None


def test_a_cluster_that_fails_every_three_hours(capsys: pytest.CaptureFixture[str]) -> None:
    """16,384 accelerators in 2,048 nodes that each fail every 6,144 hours; 80 GB in each node.

    Training stands still for 80 / 8 = 10 s, a save takes 80 / 2 = 40 s, and a restore 80 / 4 = 20 s and 5 minutes.
    """
    rates = ("--size", "80GB", "--pause-rate", "8GB/s", "--save-rate", "2GB/s", "--restore-rate", "4GB/s")
    found = answer(capsys, "--mtbf", "6144h", "--nodes", "2048", "--background", *rates, "--restore", "5m")
    assert found["costs"] == {"save_s": 40, "blocked_s": 10, "restore_s": 320, "mtbf_s": 3 * 3600}
    # sqrt(2 * 10 * 10800) = 464.8 by Young; the share lost to failures is about (237 + 30 + 320) / 10800.
    assert found["optimum"]["young_s"] == pytest.approx(464.758)
    assert found["forecast"]["shares"]["effective"] == pytest.approx((1 - 587 / 10_800) * (1 - 10 / 474), abs=0.003)
    middle = next(row for row in found["intervals"] if row["work_s"] == found["forecast"]["work_s"])
    assert abs(middle["simulated"] - middle["effective"]) < 2 * middle["simulated_error"]


def test_the_same_seed_gives_the_same_answer(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--save", "1m", "--restore", "4m", "--mtbf", "6h")
    first, again = (answer(capsys, *words, "--seed", "7") for _ in range(2))
    assert first == again
    assert first["intervals"] != answer(capsys, *words, "--seed", "8")["intervals"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run whose saves took 4 s, half a second of it before training went on, one every 10 minutes."""
    storage = LocalStorage(tmp_path / "run")
    chain = begin(storage)
    storage.put("incarnations/000001.alive", b"17")
    for minute in (10, 20, 30):
        created = f"2025-03-01T12:{minute}:00+00:00"
        name = write_generation(
            storage, minute, chain=chain, created=created, timings_s={"stage": 0.5, "plan": 0.5, "write": 3.0}
        )
    write_incarnation(storage, 2, chain=(*chain, LineageLink(2, name, 30)), is_closed=False)
    return tmp_path / "run"


def test_what_is_not_typed_is_taken_from_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--from", run, "--restore", "1m")
    assert found["costs"] == {"save_s": 4.0, "blocked_s": 4.0, "restore_s": 60.0, "mtbf_s": 1800.0}
    assert (found["interval_from"], found["forecast"]["period_s"]) == ("measured", 600.0)
    typed = ("--background", "--blocked", "0.5s", "--mtbf", "6h", "--interval", "5m")
    found = answer(capsys, "--from", run, "--restore", "1m", *typed)
    assert found["costs"] == {"save_s": 4.0, "blocked_s": 0.5, "restore_s": 60.0, "mtbf_s": 21600.0}
    assert (found["interval_from"], found["forecast"]["work_s"]) == ("typed", 300.0)


def test_how_saves_are_made_and_what_they_took_is_taken_from_the_journals(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def note(*saves: tuple[float, float, bool]) -> None:
        lines = [
            {"event": "saved", "blocked_s": blocked, "total_s": total, "is_background": beside}
            for blocked, total, beside in saves
        ]
        (run / "journal").mkdir(exist_ok=True)
        (run / "journal" / "000001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    note((6.0, 5.0, False), (1.5, 9.0, True))
    found = answer(capsys, "--from", run, "--restore", "1m")
    assert (found["costs"]["save_s"], found["costs"]["blocked_s"], found["background"]) == (9.0, 1.5, True)
    found = answer(capsys, "--from", run, "--restore", "1m", "--synchronous")
    assert (found["costs"]["save_s"], found["costs"]["blocked_s"], found["background"]) == (6.0, 6.0, False)
    note((6.0, 5.0, False))
    said = refusal(capsys, "--from", str(run), "--restore", "1m", "--background")
    assert "--blocked" in said and "no save in the background" in said


def test_saves_that_follow_each_other_too_fast_name_the_run_and_not_an_option_that_nobody_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = LocalStorage(tmp_path / "toy")
    chain = begin(storage)
    for second in (1, 2):
        created = f"2025-03-01T12:00:0{second}+00:00"
        write_generation(storage, second, chain=chain, created=created, timings_s={"write": 3.0})
    told = refusal(capsys, "--from", str(tmp_path / "toy"), "--restore", "2m")
    assert "[--from]" in told
    assert "a save every 1 s" in told


def test_another_size_is_planned_without_the_interval_that_was_measured(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, "--from", run, "--restore", "1m", "--size", "80GB", "--mtbf", "60000d")
    assert found["interval_from"] == "best"
    assert main(["plan", "--from", str(run), "--restore", "1m", "--size", "80GB", "--mtbf", "60000d"]) == 0
    assert "say little of a size" in capsys.readouterr().out


def test_a_run_that_tells_no_interval_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = LocalStorage(tmp_path / "one")
    write_generation(storage, 1, chain=begin(storage), timings_s={"write": 3.0})
    said = refusal(capsys, "--from", str(tmp_path / "one"), "--restore", "1m")
    assert "too few checkpoints to tell an interval" in " ".join(said.split())


def test_a_larger_checkpoint_takes_longer_at_the_rate_that_was_measured(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = answer(capsys, "--from", run, "--restore", "1m")["measured"]["size_bytes"]
    found = answer(capsys, "--from", run, "--restore", "1m", "--size", f"{10 * size}B", "--interval", "10m")
    assert found["costs"]["save_s"] == pytest.approx(40.0)


def test_a_run_that_is_not_there_is_not_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--from", str(tmp_path / "none"), "--restore", "1m"]) == 3
    assert "there is no run here" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, option",
    [
        ("--restore 4m --mtbf 6h", "--save"),
        ("--save 1m --mtbf 6h", "--restore"),
        ("--save 1m --restore 4m", "--interval"),
        ("--save 1 --restore 4m --mtbf 6h", "--save"),
        ("--save 1m --restore 4x --mtbf 6h", "--restore"),
        ("--save 1m --restore 4m --mtbf soon", "--mtbf"),
        ("--save 0s --restore 4m --mtbf 6h", "--save"),
        ("--save 1m --restore 4m --mtbf 0h", "--mtbf"),
        ("--save 1m --restore 4m --nodes 8 --interval 20m", "--nodes"),
        ("--save 1m --restore 4m --mtbf 6h --interval 1m --interval-includes-save", "--interval"),
        ("--save 5m --restore 4m --mtbf 6h --background --blocked 1m --interval 3m", "--interval"),
        ("--save 1m --restore 4m --mtbf 6h --blocked 1s", "--blocked"),
        ("--save 1m --restore 4m --mtbf 6h --background", "--background"),
        ("--save 1m --restore 4m --mtbf 6h --background --blocked 2m", "--blocked"),
        ("--save-rate 2GB/s --restore 4m --mtbf 6h", "--save-rate"),
        ("--save-rate 2GB --size 8GB --restore 4m --mtbf 6h", "--save-rate"),
        ("--save-rate 2GB/s --size 8 --restore 4m --mtbf 6h", "--size"),
        ("--save 1m --save-rate 2GB/s --size 8GB --restore 4m --mtbf 6h", "--save"),
        ("--save 1m --restore 4m --interval 20m --since-save late", "--since-save"),
        ("--save 1m --restore 4m --interval 20m --svg a.svg", "--svg"),
    ],
)
def test_an_error_names_the_option(words: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"[{option}]" in refusal(capsys, *words.split())


@pytest.mark.parametrize(
    "text, seconds",
    [
        ("1m", 60),
        ("90s", 90),
        ("6h", 21600),
        ("1h30m", 5400),
        ("0.5h", 1800),
        ("250ms", 0.25),
        ("2d", 172800),
        ("1 h", 3600),
    ],
)
def test_durations_are_read_as_people_type_them(text: str, seconds: float) -> None:
    assert duration_s(text, option="--save") == seconds


@pytest.mark.parametrize("text", ["", "5", "m", "1m5", "-1m", "1e3s", "1h-5m", "nan s", "1 minute"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="--save"):
        duration_s(text, option="--save")


def test_sizes_and_rates_have_units() -> None:
    assert size_bytes("80GB", option="--size") == 80e9
    assert size_bytes("1.5 GiB", option="--size") == 1.5 * 2**30
    assert rate("2GB/s", option="--save-rate") == 2e9
    for text in ("80", "80gb", "0GB", "80GB/s"):
        with pytest.raises(RequestError):
            size_bytes(text, option="--size")
    with pytest.raises(RequestError):
        rate("2GB/h", option="--save-rate")


def test_a_duration_is_told_with_three_digits() -> None:
    told = [duration_text(seconds) for seconds in (0.5, 59.0, 60.0, 5400.0, 7200.0, 200_000.0)]
    assert told == ["0.5 s", "59 s", "1 min", "90 min", "2 h", "2.31 d"]


def test_the_curves_are_drawn_into_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra `report`")
    path = tmp_path / "plan.svg"
    answer(capsys, "--save", "1m", "--restore", "4m", "--mtbf", "6h", "--svg", path)
    assert "work between two saves" in path.read_text(encoding="utf-8")


def test_a_plan_imports_nothing_large() -> None:
    code = (
        "import sys; from safepoint.cli import main; "
        "main('plan --save 1m --restore 4m --mtbf 6h --json'.split()); "
        "print([name for name in ('torch', 'numpy', 'matplotlib', 'rich') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stderr.strip() == "[]"
