"""Processes that begin with torch imported, and those that begin without its compiler, are like any other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm import EAGER, SOURCE, WarmPython


def test_a_script_leaves_nothing_behind_for_the_next_one(tmp_path: Path, warm_python: WarmPython) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, torch\n"
        "assert 'safepoint' not in sys.modules\n"
        "print(os.getpid(), os.environ.get('LEFT'), torch.get_default_dtype(), os.getcwd())\n"
        "import safepoint\n"
        "os.environ['LEFT'] = 'x'\n"
        "torch.set_default_dtype(torch.float64)\n"
    )
    first, second = (warm_python.run(script, folder=tmp_path, logs=tmp_path) for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.errors + second.errors
    pid, *rest = first.output.split()
    assert rest == ["None", "torch.float32", str(tmp_path)]
    assert second.output.split()[1:] == rest and second.output.split()[0] != pid


def test_a_rank_that_fails_ends_the_others(tmp_path: Path, warm_python: WarmPython) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys\n"
        "print(os.environ['RANK'], os.environ['WORLD_SIZE'], *sys.argv[1:], flush=True)\n"
        "sys.exit(3) if os.environ['RANK'] == '1' else signal.pause()\n"
    )
    waits, fails = warm_python.run_ranks(script, "a", 2, count=2, logs=tmp_path)
    assert (waits.returncode, fails.returncode) == (-9, 3)
    assert fails.output.split() == ["1", "2", "a", "2"]


def test_a_script_that_takes_too_long_is_ended(tmp_path: Path, warm_python: WarmPython) -> None:
    script = tmp_path / "script.py"
    script.write_text("import signal\nsignal.pause()\n")
    assert warm_python.run(script, folder=tmp_path, logs=tmp_path, limit_s=1).returncode == -14


TRAINING = """
import json, sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
is_absent = "torch._dynamo.utils" not in sys.modules
import torch._dynamo.utils
is_itself = torch._dynamo.utils is sys.modules["torch._dynamo.utils"]
compiled = torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
print(json.dumps([is_absent, is_itself, compiled.tolist(), model.weight.tolist()]))
"""


@pytest.mark.soak
def test_a_training_without_a_compiler_is_the_same_and_the_compiler_comes_when_it_is_needed() -> None:
    told = []
    for path in ([SOURCE, EAGER], [SOURCE]):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
        command = [sys.executable, "-c", TRAINING]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=100)
        told.append(json.loads(done.stdout))
    assert [one[0] for one in told] == [True, False]
    assert told[0][1:] == told[1][1:]
    assert told[0][1:3] == [True, [2.0, 2.0]]
