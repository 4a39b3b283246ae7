"""Python reads this as it starts, in processes that tests start: what compiles nothing there does without a compiler.

The first optimizer of a process imports torch's compiler, only to ask it to leave a function alone, and that takes as
long as importing torch. Those two requests are answered here; whatever else is asked of it brings it in after all.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"


class Absent(ModuleType):
    """Stand for the compiler until it is needed."""

    __path__: Sequence[str] = ()

    @staticmethod
    def disable(function: Callable[..., Any], *ignored: object, **settings: object) -> Callable[..., Any]:
        """Return the function, which is compiled by nobody."""
        return function

    @staticmethod
    def graph_break(message: str = "") -> None:
        """Do nothing: no graph is made."""

    def __getattr__(self, name: str) -> Any:
        return getattr(present(), name)


class Absence(MetaPathFinder, Loader):
    """Find the compiler absent at first, and its parts only when it has come."""

    def find_spec(self, name: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == COMPILER:
            return ModuleSpec(name, self, is_package=True)
        if not name.startswith(f"{COMPILER}."):
            return None
        present()
        importlib.import_module(name)
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules.get(spec.name) or Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: what is there has been executed."""


def present() -> ModuleType:
    """Import the compiler, unless that is done or under way, and return it."""
    if ABSENCE in sys.meta_path:
        sys.meta_path.remove(ABSENCE)
        sys.modules.pop(COMPILER, None)
    return importlib.import_module(COMPILER)


ABSENCE = Absence()
sys.meta_path.insert(0, ABSENCE)
