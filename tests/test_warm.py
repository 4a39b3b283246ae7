"""The processes that begin with torch imported are processes of their own, and a rank that fails ends the others."""

from __future__ import annotations

from pathlib import Path

from tests.warm import WarmPython


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
