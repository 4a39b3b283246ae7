"""The walls of the package: who may import whom, and where torch, chance, processes and pickles may enter."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.source import (
    PACKAGE,
    broken,
    called_name,
    dotted,
    imports,
    is_dynamic_import,
    module_name,
    nodes,
    package_files,
    parse,
    within,
)

# From the bottom to the top. Imports go downwards only; names on one line never import each other.
LAYERS = (
    ("errors",),
    ("ambient",),
    ("storage", "group", "format", "signals", "collector"),
    ("contract", "progress", "stop", "notes", "duration"),
    ("catalog", "state", "data", "faults", "journal"),
    ("joining", "passes"),
    ("saving", "restoring", "retention", "schedule", "planning", "boundary", "evidence", "checkpoints"),
    ("stats",),
    ("behind",),
    ("saver", "conditions", "membership", "source"),
    ("due", "settings"),
    ("iteration", "enrolment", "restoration"),
    ("manager", "run"),
    ("drill", "audit", "report", "integrations", "interop", "testing"),
    ("cli",),
)
LINE = {name: line for line, names in enumerate(LAYERS) for name in names}

TORCH = frozenset({"torch", "torchdata", "safetensors.torch"})
TORCH_PACKAGES = frozenset({"state", "data", "audit", "interop", "integrations"})
TORCH_FREE_FILES = frozenset(
    {"state/__init__.py", "state/far.py", "state/item.py", "state/portions.py", "state/snapshot.py"}
)

CHANCE = frozenset({"time", "random", "uuid", "secrets", "socket"})
CHANCE_OF_OS = frozenset({"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv", "urandom", "getrandom"})
CLOCK_READERS = frozenset({"now", "utcnow", "today"})

PICKLES = frozenset({"pickle", "_pickle", "pickletools", "cloudpickle", "dill", "joblib", "shelve", "marshal"})
PROCESS_STARTERS = frozenset({"system", "popen", "fork", "forkpty", "posix_spawn", "posix_spawnp", "execv", "execve"})

# What must be importable where torch cannot be: the format, the protocol, the reading commands and all crash tests.
TORCH_FREE_UNITS = frozenset(LINE) - TORCH_PACKAGES - {
    "manager",
    "run",
    "passes",
    "boundary",
    "conditions",
    "due",
    "enrolment",
    "iteration",
    "restoration",
    "report",
    "testing",
} | {"state.far", "state.item", "state.portions", "state.snapshot"}

ROOT_FILE = PACKAGE / "__init__.py"
FILES = package_files()
OTHER_FILES = [path for path in FILES if path != ROOT_FILE]


def unit(module: str) -> str:
    """Return the name in the layer table that a module of the package belongs to."""
    return module.split(".")[1] if "." in module else ""


def inside(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def may_import_torch(path: Path) -> bool:
    name = inside(path)
    package = name.split("/")[0]
    if name in TORCH_FREE_FILES:
        return False
    return (
        package in TORCH_PACKAGES
        or name == "group/torch_store.py"
        or name.startswith("testing/ranks")
        or (package == "drill" and path.name.startswith("worker"))
    )


def may_meet_chance(path: Path) -> bool:
    return inside(path) == "ambient.py" or inside(path).startswith("cli/")


def test_every_module_has_its_place_in_the_table() -> None:
    def homeless(path: Path) -> Iterator[str]:
        if unit(module_name(path)) not in LINE:
            yield "1: this module is in no layer: add it to LAYERS by a decision record"

    wrong = broken(homeless, OTHER_FILES)
    assert not wrong, wrong


def test_imports_go_downwards_only() -> None:
    def upwards(path: Path) -> Iterator[str]:
        own = unit(module_name(path))
        for found in imports(path):
            other = unit(found.module)
            if not found.module.startswith("safepoint.") or other == own or found.module == "safepoint.__version__":
                continue
            if other not in LINE:
                yield f"{found.line}: imports the public name {other!r}; import it from the module that defines it"
            elif LINE[other] >= LINE[own]:
                yield f"{found.line}: {own} must not import {other}, which is not below it"

    wrong = broken(upwards, [path for path in FILES if unit(module_name(path)) in LINE])
    assert not wrong, wrong


def test_the_package_imports_itself_by_module_only() -> None:
    """``import safepoint`` binds every public name at once, and hides from this test which of them is used."""

    def whole(path: Path) -> Iterator[str]:
        yield from (f"{found.line}: import safepoint" for found in imports(path) if found.module == "safepoint")

    wrong = broken(whole, FILES)
    assert not wrong, wrong


def test_a_module_is_imported_by_a_constant_name() -> None:
    def unreadable(path: Path) -> Iterator[str]:
        for node in nodes(path):
            if not isinstance(node, ast.Call) or not is_dynamic_import(node):
                continue
            if not (node.args and isinstance(node.args[0], ast.Constant)):
                yield f"{node.lineno}: imports a module whose name no test can read"

    wrong = broken(unreadable, OTHER_FILES)
    assert not wrong, wrong


def test_the_testing_package_is_imported_by_tests_only() -> None:
    files = [path for path in FILES if unit(module_name(path)) != "testing"]
    wrong = broken(lambda path: imports_of(path, {"safepoint.testing"}), files)
    assert not wrong, wrong


def test_torch_is_imported_in_its_places_only() -> None:
    files = [path for path in FILES if not may_import_torch(path)]
    wrong = broken(lambda path: imports_of(path, TORCH), files)
    assert not wrong, wrong


def test_clock_entropy_host_and_environment_are_read_in_ambient_only() -> None:
    of_os = {f"os.{name}" for name in CHANCE_OF_OS}

    def readings(path: Path) -> Iterator[str]:
        # The streams of the random module are themselves state to capture and to set.
        forbidden = CHANCE - {"random"} if unit(module_name(path)) in {"state", "data"} else CHANCE
        # A transport, as the store is; what it tells is never relied on.
        forbidden = forbidden - {"socket"} if inside(path) == "group/socket_bell.py" else forbidden
        yield from imports_of(path, forbidden | of_os)
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and dotted(node) in of_os:
                yield f"{node.lineno}: reads {dotted(node)}"
            if isinstance(node, ast.Call) and _reads_the_clock(node):
                yield f"{node.lineno}: calls {called_name(node)}"

    wrong = broken(readings, [path for path in FILES if not may_meet_chance(path)])
    assert not wrong, wrong


def test_nothing_is_pickled_and_loading_runs_no_code() -> None:
    def unsafe(path: Path) -> Iterator[str]:
        yield from imports_of(path, PICKLES)
        yield from (f"{f.line}: imports {f.module}" for f in imports(path) if f.module in {"torch.load", "torch.save"})
        for node in nodes(path):
            if isinstance(node, ast.Call) and (reason := _runs_foreign_code(node, path)):
                yield f"{node.lineno}: {reason}"

    wrong = broken(unsafe, FILES)
    assert not wrong, wrong


def test_processes_are_started_by_the_drill_and_the_command_line_only() -> None:
    def starts(path: Path) -> Iterator[str]:
        yield from imports_of(path, {"subprocess"})
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and dotted(node) in {f"os.{name}" for name in PROCESS_STARTERS}:
                yield f"{node.lineno}: uses {dotted(node)}"

    wrong = broken(starts, [path for path in FILES if unit(module_name(path)) not in {"drill", "cli"}])
    assert not wrong, wrong


def test_the_root_imports_nothing_of_the_package_when_it_is_imported() -> None:
    allowed = {"__future__", "importlib", "typing", "collections.abc"}

    def imported(path: Path) -> Iterator[str]:
        for node in parse(path).body:
            if isinstance(node, ast.If) and dotted(node.test) == "TYPE_CHECKING":
                continue
            for inner in ast.walk(node):
                if isinstance(inner, ast.ImportFrom) and inner.module not in allowed:
                    yield f"{inner.lineno}: from {inner.module} import …"
                if isinstance(inner, ast.Import):
                    yield f"{inner.lineno}: import {inner.names[0].name}"

    wrong = broken(imported, [ROOT_FILE])
    assert not wrong, wrong


def test_importing_the_package_does_not_import_torch() -> None:
    run_python("import safepoint, sys; assert 'torch' not in sys.modules, 'safepoint imported torch'")


def test_what_reads_a_run_is_importable_where_torch_is_not() -> None:
    modules = [
        module_name(path)
        for path in FILES
        if within(module_name(path), {f"safepoint.{name}" for name in TORCH_FREE_UNITS})
        and not may_import_torch(path)
        and path.name != "__main__.py"
    ]
    assert {"safepoint.errors", "safepoint.format", "safepoint.state.item"} <= set(modules)
    run_python(
        f"""
import importlib, sys, traceback

class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("torch is walled off")

sys.meta_path.insert(0, Wall())
failed = []
for name in {modules!r}:
    try:
        importlib.import_module(name)
    except ImportError:
        failed.append(name + ": " + traceback.format_exc().strip())
if failed:
    sys.exit("\\n\\n".join(failed))
"""
    )


def imports_of(path: Path, forbidden: frozenset[str] | set[str]) -> Iterator[str]:
    """Yield a finding for each import of a forbidden module, or of what lies in one."""
    yield from (f"{found.line}: imports {found.module}" for found in imports(path) if within(found.module, forbidden))


def run_python(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def _reads_the_clock(call: ast.Call) -> bool:
    owner, _, name = called_name(call).rpartition(".")
    return name in CLOCK_READERS and owner.split(".")[-1] in {"datetime", "date"}


def _runs_foreign_code(call: ast.Call, path: Path) -> str | None:
    name = called_name(call)
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if name in {"eval", "exec"}:
        return f"calls {name}"
    if "allow_pickle" in keywords and not _is_constant(keywords["allow_pickle"], False):
        return "lets numpy unpickle"
    if name not in {"torch.load", "torch.save"}:
        return None
    if unit(module_name(path)) != "interop":
        return f"calls {name} outside interop"
    if name == "torch.load" and not _is_constant(keywords.get("weights_only"), True):
        return "calls torch.load without weights_only=True"
    return None


def _is_constant(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value
