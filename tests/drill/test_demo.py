"""Perform the demonstration for real."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from safepoint.ambient import SystemAmbient
from safepoint.drill.demo import Demonstration, perform, training_script
from tests.warm import EAGER, ROOT, SOURCE


@pytest.mark.timeout(400)
def test_every_act_holds_and_every_damage_is_refused_with_its_reason(tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, [str(SOURCE), str(EAGER), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    demonstration = Demonstration(tmp_path, sys.executable, training_script(), environment, SystemAmbient())
    acts = list(perform(demonstration))
    assert len(acts) == 6
    assert [act.seen for act in acts if not act.holds] == []
    flipped, removed, emptied = acts[4].messages
    assert "step-000000000060" in flipped and "digest" in flipped
    assert "step-000000000050" in removed and "missing" in removed
    assert "step-000000000040" in emptied and "empty" in emptied
    job = " ".join(acts[5].messages)
    assert "130 updates were done after this step and will be done again" in job
    assert "read back equal" in job


def test_the_script_of_a_checkout_is_the_example_itself() -> None:
    assert training_script() == ROOT / "examples" / "digits.py"
