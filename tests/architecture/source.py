"""Find the files the architecture tests read, and parse them once."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "safepoint"


@dataclass(frozen=True, slots=True)
class Import:
    """Name one module that a file imports, at whatever depth of the file, and the line that does it."""

    module: str
    line: int


@cache
def parse(path: Path) -> ast.Module:
    """Return the syntax tree of one file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return every node of the syntax tree of one file; a dozen rules walk the same trees."""
    return tuple(ast.walk(parse(path)))


def broken(rule: Callable[[Path], Iterable[str]], paths: Iterable[Path]) -> str:
    """Return what a rule finds wrong in the files, one finding per line, each with its place.

    One test holds a rule for all files: a test of its own for each file costs more than what it checks.
    """
    return "\n".join(f"{shown(path)}:{finding}" for path in paths for finding in rule(path))


def package_files() -> list[Path]:
    """Return every Python file of the package; an empty list would make every rule hold, so it is an error."""
    files = sorted(PACKAGE.rglob("*.py"))
    assert files, f"no Python file under {PACKAGE}"
    return files


def module_name(path: Path) -> str:
    """Return the dotted name under which a file of the package is imported."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def shown(path: Path) -> str:
    """Return a path as a reader of the repository would write it."""
    return path.relative_to(ROOT).as_posix()


def tracked_files() -> list[Path]:
    """Return every file that git tracks and that is there."""
    answer = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True)
    files = [ROOT / name for name in answer.stdout.decode().split("\0") if name]
    assert files, "git tracks no file"
    return [path for path in files if path.is_file()]


def imports(path: Path) -> Iterator[Import]:
    """Yield every import of a file, those in functions, under TYPE_CHECKING and by a constant name included.

    ``from safepoint import x`` yields ``safepoint.x``, whether x is a module or a name.
    """
    for node in nodes(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(path, node)
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno)
        elif isinstance(node, ast.Call) and is_dynamic_import(node):
            name = node.args[0] if node.args else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield Import(name.value, node.lineno)


def is_dynamic_import(call: ast.Call) -> bool:
    """Return whether a call imports a module by the name it is given."""
    return called_name(call) in {"__import__", "import_module", "importlib.import_module", "importlib.__import__"}


def called_name(call: ast.Call) -> str:
    """Return the dotted name of what is called, or an empty string where it is no plain name."""
    return dotted(call.func)


def dotted(node: ast.expr) -> str:
    """Return ``a.b.c`` for such an expression, or an empty string for any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def within(module: str, names: frozenset[str] | set[str]) -> str | None:
    """Return the name among `names` that `module` is, or lies in."""
    return next((name for name in sorted(names) if module == name or module.startswith(name + ".")), None)


def _absolute(path: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    package = package[: len(package) - (node.level - 1)]
    return ".".join([*package, *([node.module] if node.module else [])])
