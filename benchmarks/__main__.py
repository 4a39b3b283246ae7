"""Ask every question in turn, and write documents, tables and plots into a folder.

    make .venv/.bench                                          # once: what they need
    .venv/bin/python benchmarks                                # all, in under ten minutes on two cores
    .venv/bin/python benchmarks --only restore --only growth   # these
    .venv/bin/python benchmarks --full                         # states of 1 GiB, and growth up to 4 GiB

Each question runs in a process of its own. A question that fails is named at the end, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# Without these no question can be asked; torchsnapshot and matplotlib are left out where they are not.
NEEDED = ("torch", "safepoint", "safetensors")
REMEDY = "Run `make .venv/.bench`, then `.venv/bin/python benchmarks ...`."
# What bounds a question that sets none of its own, so that all together keep to ten minutes; seconds for its rounds.
USUAL_S, LONG_S = 30.0, 70.0
LONG = frozenset({"synchronous_save", "restore"})
# Each of their rounds starts a process for every library.
FEW_ROUNDS = frozenset({"background_memory", "restore_memory"})
# Questions that take the options of the harness, with the sizes that `--full` asks for.
FULL_SIZES = {
    "memory_and_disk": "1GiB",
    "synchronous_save": "1GiB",
    "background_save": "1GiB",
    "background_at_once": "1GiB",
    "background_memory": "1GiB",
    "restore": "1GiB",
    "restore_memory": "1GiB",
    "small_tensors": None,
    "partial_change": "1GiB",
    "small_state": None,
    "python_per_tensor": None,
    "ranks": "512MiB",
    "growth": "4GiB",
}


def main() -> int:
    """Ask, write, and print where it lies."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"not installed: {', '.join(missing)}. {REMEDY}", file=sys.stderr)
        return 1
    # These import what may be missing.
    from harness.document import RESULTS
    from harness.report import markdown, plots, summary

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=RESULTS, help="where documents, tables and plots go")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="ask this one; may be repeated")
    parser.add_argument("--full", action="store_true", help="the sizes of the targets, which takes much longer")
    parser.add_argument("--size", help="bytes of the state for all questions that have one, such as 64MiB")
    parser.add_argument("--rounds", type=int, help="rounds that are kept, for all questions")
    parser.add_argument("--folder", type=Path, help="a folder on the disk that is measured; the results' by default")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    others = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in FULL_SIZES and path.stem != "__main__")
    names = asked.only or [*FULL_SIZES, *others]
    failed = [name for name in names if not ask(name, asked)]
    documents = stored(asked.out, [*FULL_SIZES, *others])
    (asked.out / "summary.json").write_text(json.dumps(summary(documents), indent=1, ensure_ascii=False) + "\n")
    (asked.out / "tables.md").write_text(markdown(documents) + "\n")
    drawn = plots(documents, asked.out)
    print(f"tables.md, summary.json and {len(drawn)} plots are in {asked.out}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def ask(name: str, asked: argparse.Namespace) -> bool:
    """Run one question, and keep the document that it prints."""
    started = time.monotonic()
    done = subprocess.run([sys.executable, str(HERE / f"{name}.py"), *arguments(name, asked)], stdout=subprocess.PIPE)
    print(f"{name}: {time.monotonic() - started:.0f} s, exit code {done.returncode}", flush=True)
    if done.returncode == 0:
        (asked.out / f"{name}.json").write_bytes(done.stdout)
    return done.returncode == 0


def arguments(name: str, asked: argparse.Namespace) -> list[str]:
    """Return the options of one question."""
    if name not in FULL_SIZES:
        return []
    found = ["--folder", str(asked.folder or asked.out)]
    if not asked.full:
        found += ["--seconds", str(LONG_S if name in LONG else USUAL_S)]
    rounds = asked.rounds or (2 if name in FEW_ROUNDS and not asked.full else None)
    if rounds:
        found += ["--rounds", str(rounds)]
    size = asked.size or (FULL_SIZES[name] if asked.full else None)
    if name == "small_tensors" and not asked.full:
        # DCP and torchsnapshot need most of a minute for each round of all 5,000.
        found += ["--count", "50" if asked.size else "2500"]
    return [*found, "--size", size] if size and FULL_SIZES[name] else found


def stored(folder: Path, names: list[str]) -> dict[str, Mapping[str, Any]]:
    """Return the documents that lie in a folder, those of earlier runs included."""
    paths = {name: folder / f"{name}.json" for name in names}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.is_file()}


if __name__ == "__main__":
    raise SystemExit(main())
