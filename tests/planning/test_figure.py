"""The picture: a file of its own, the same for the same numbers, and a clear error without matplotlib."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from safepoint.errors import RequestError
from safepoint.planning.costs import Costs
from safepoint.planning.figure import curve, draw
from safepoint.planning.forecast import divide

COSTS = Costs(60.0, 60.0, 240.0, 21_600.0)


def test_the_curve_reaches_far_to_both_sides_of_what_is_asked_for() -> None:
    points = curve(COSTS, 21_600.0, around_s=[1000.0, 2000.0])
    assert (points[0][0], points[-1][0]) == (pytest.approx(100), pytest.approx(20_000))
    assert all(shares == divide(COSTS, work_s, 21_600.0) for work_s, shares in points)


def test_the_picture_is_an_svg_and_the_same_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra `report`")
    for name in ("one.svg", "two.svg"):
        draw(tmp_path / name, COSTS, 21_600.0, work_s=1140.0, simulated=[(1140.0, 0.9), (2280.0, 0.91)])
    assert ElementTree.parse(tmp_path / "one.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RequestError, match=r"pip install 'safepoint\[report\]'") as caught:
        draw(tmp_path / "one.svg", COSTS, 21_600.0, work_s=1140.0, simulated=[])
    assert caught.value.where == "--svg"
    assert not list(tmp_path.iterdir())
