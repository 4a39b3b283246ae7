"""Perform the demonstration for real."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from safepoint.ambient import SystemAmbient
from safepoint.drill.demo import Demonstration, perform, training_script

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(400)
def test_every_act_holds_and_every_damage_is_refused_with_its_reason(tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    demonstration = Demonstration(tmp_path, sys.executable, training_script(), environment, SystemAmbient())
    acts = list(perform(demonstration))
    assert len(acts) == 8
    assert [act.seen for act in acts if not act.holds] == []
    flipped, removed, emptied, job = (" ".join(act.messages) for act in acts[4:])
    assert "digest" in flipped
    assert "missing" in removed
    assert "empty" in emptied
    assert "130 updates were done after this step and will be done again" in job
    assert "read back equal" in job


def test_the_script_of_a_checkout_is_the_example_itself() -> None:
    assert training_script() == ROOT / "examples" / "digits.py"
