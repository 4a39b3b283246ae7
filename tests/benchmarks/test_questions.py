"""Every question of benchmarks/ runs on a tiny state and prints one document that holds together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm import WarmPython

pytest.importorskip("safetensors", reason="the peers are measured with it")

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
TINY = ("--size", "1MiB", "--rounds", "1")

# One process for several questions: importing the benchmarks takes longer than all of these.
SEVERAL = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import memory_and_disk, partial_change, small_state
from harness.document import Settings, show
for module in (memory_and_disk, partial_change, small_state):
    asked = Settings(1 << 18, 1, Path(sys.argv[2]))
    show(module.__doc__, asked, module.answer(asked))
    print("next", flush=True)
"""

SCALE = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import commit_scale
from harness.scaled_restore import PARTS
folder = Path(sys.argv[2])
commit_scale.prepare(2, folder)
found = {"lead": commit_scale.lead(2, folder, 0.0)}
print(json.dumps({**found, **{name: part(2, folder, 0.0, 0.0) for name, part in PARTS.items()}}))
"""


def test_quick_questions_print_a_document_and_leave_nothing(tmp_path: Path, warm_python: WarmPython) -> None:
    script, states = tmp_path / "several.py", tmp_path / "states"
    script.write_text(SEVERAL)
    states.mkdir()
    done = warm_python.run(script, BENCHMARKS, states, folder=tmp_path, logs=tmp_path)
    assert done.returncode == 0, done.errors
    documents = [json.loads(text) for text in done.output.split("next\n") if text]
    assert len(documents) == 3
    for document in documents:
        check(document)
    assert list(states.iterdir()) == []


def test_the_work_for_many_ranks_is_measured_for_a_few(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCALE, str(BENCHMARKS), str(tmp_path)],
        env=ENVIRONMENT,
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["lead"]["next"]["looks_at_objects"] == 4, "two objects of each of two ranks"
    assert found["lead_restore"]["messages_of_the_leader"]["count"] > 0
    assert found["rank_restore"]["ranks"] == 2
    assert found["alone_restore"]["plan_s"] > 0


@pytest.mark.soak
@pytest.mark.timeout(1900)
def test_all_questions_make_tables(tmp_path: Path) -> None:
    out = tmp_path / "results"
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS), str(out), *TINY],
        env=ENVIRONMENT,
        check=False,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    questions = {path.stem for path in BENCHMARKS.glob("*.py")} - {"__main__"}
    documents = {path.stem: json.loads(path.read_text()) for path in out.glob("*.json") if path.stem != "summary"}
    assert documents.keys() == questions
    for name, document in documents.items():
        if "targets" in document:
            check(document)
        assert document["question"] in (out / "tables.md").read_text(), name
    rows = json.loads((out / "summary.json").read_text())
    assert sum(len(document.get("targets", [])) for document in documents.values()) == len(rows)
    assert not [path for path in out.iterdir() if path.is_dir()]


def test_a_module_that_is_not_installed_is_one_line_and_no_table(tmp_path: Path) -> None:
    out = tmp_path / "out"
    # Without site-packages there is no torch.
    command = [sys.executable, "-S", "-E", str(BENCHMARKS), str(out), "--only", "small_state"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("not installed: torch") and "make .venv/.bench" in line
    assert not out.exists()


def check(document: dict[str, object]) -> None:
    """Assert what holds for the document of any question."""
    assert document["question"].endswith("?")
    assert document["machine"]["processors"] > 0 and document["machine"]["versions"]["torch"]
    for by_name in document["measures"].values():
        for values in by_name.values():
            assert len(values["rounds"]) == document["rounds"]
            assert values["min"] <= values["median"] <= values["max"]
    for target in document["targets"]:
        assert target["aim"][0] in "≤≥"
        assert target["met"] in (True, False)
        assert target["median"] is not None or target["note"]
