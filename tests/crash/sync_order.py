"""Judge from the system calls of a save whether each byte and each name was durable before what relies on it.

A file's bytes are durable after a sync of the file that follows its last write, a name after a sync of its folder. A
call that failed did nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.crash.tracing import Call

MANIFEST = "manifest.json"
TOMBSTONE = "deleted.json"
# Each of these goes only after the ones before it are gone for good.
LEAVES_LAST = (MANIFEST, TOMBSTONE)


@dataclass(frozen=True, slots=True)
class Step:
    """What a call did, to which path."""

    verb: str
    path: str

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass(slots=True)
class SyncOrder:
    """Follow the steps of one save, and note each one that relied on what was not durable yet."""

    violations: list[str] = field(default_factory=list)
    bytes_at_risk: set[str] = field(default_factory=set)
    names_at_risk: dict[str, set[str]] = field(default_factory=dict)
    removals_at_risk: dict[str, set[str]] = field(default_factory=dict)

    def follow(self, step: Step) -> None:
        """Take the next step."""
        if step.verb == "write":
            self.bytes_at_risk.add(step.path)
        elif step.verb == "sync":
            self.bytes_at_risk.discard(step.path)
            self.names_at_risk.pop(step.path, None)
            self.removals_at_risk.pop(step.path, None)
        elif step.verb in ("create", "make folder", "name"):
            self._appear(step)
        elif step.verb in ("delete", "delete folder"):
            self._vanish(step)

    def end(self) -> list[str]:
        """Return all violations; a name that is at risk when the save is reported done is one."""
        for folder, names in (*self.names_at_risk.items(), *self.removals_at_risk.items()):
            self.violations.append(f"the save is done, and {folder} is not synced after {sorted(names)}")
        return self.violations

    def _appear(self, step: Step) -> None:
        above = step.folder.rpartition("/")
        if above[2] in self.names_at_risk.get(above[0], ()):
            self.violations.append(f"{step.verb} {step.path}: the name of its folder is not durable (C2.1)")
        if step.verb == "name" and step.path in self.bytes_at_risk:
            self.violations.append(f"{step.path} gets its name before its own bytes are durable (F6.1)")
        if step.verb == "name" and step.name == MANIFEST:
            self._commit(step.folder)
        if step.verb != "create" or not step.name.startswith(".tmp-"):
            self.names_at_risk.setdefault(step.folder, set()).add(step.name)

    def _commit(self, folder: str) -> None:
        files = sorted(path for path in self.bytes_at_risk if path.startswith(f"{folder}/"))
        if files:
            self.violations.append(f"the manifest gets its name before the bytes of {files} are durable (C3.1)")
        names = sorted(self.names_at_risk.get(folder, ()))
        if names:
            self.violations.append(f"the manifest gets its name before the names {names} are durable (C3.1)")

    def _vanish(self, step: Step) -> None:
        if step.name.startswith(".tmp-"):
            return
        gone_first = self.removals_at_risk.get(step.path if step.verb == "delete folder" else step.folder, set())
        relied = gone_first if step.verb == "delete folder" or step.name in LEAVES_LAST else set()
        if relied:
            self.violations.append(f"{step.verb} {step.path}: {sorted(relied)} may come back (C12.4)")
        if TOMBSTONE in self.names_at_risk.get(step.folder, ()):
            self.violations.append(f"{step.verb} {step.path}: the mark for it is not durable (C12.1)")
        self.removals_at_risk.setdefault(step.folder, set()).add(step.name)


def violations_of(steps: Iterable[Step]) -> list[str]:
    """Return what the steps of one save, from its begin to its report, did too early."""
    order = SyncOrder()
    for step in steps:
        order.follow(step)
    return order.end()


def steps_of(calls: Sequence[Call], below: str) -> list[Step]:
    """Return the steps below a folder that an order is about; a name stands for the file that it was given to."""
    named: dict[str, str] = {}
    found = []
    for step, source in map(_step_of, calls):
        if step is not None and step.path.startswith(below):
            if step.verb == "name":
                named[source] = step.path
            found.append((step, source))
    return [Step(step.verb, named.get(step.path, step.path) if _is_of_bytes(step) else step.path) for step, _ in found]


def saves_in(calls: Sequence[Call]) -> list[list[Call]]:
    """Return the calls of each save, between the marks that the process leaves."""
    places = [
        (n, "begins" in call.text) for n, call in enumerate(calls) if re.search(r'"/save-(begins|ends)"', call.text)
    ]
    begins = [n for n, is_begin in places if is_begin]
    ends = [n for n, is_begin in places if not is_begin]
    return [list(calls[begin + 1 : end]) for begin, end in zip(begins, ends, strict=True)]


def _is_of_bytes(step: Step) -> bool:
    return step.verb in ("write", "sync")


def _step_of(call: Call) -> tuple[Step | None, str]:
    """Return the step of a call, and the name by which a file that is given another was known."""
    if not re.search(r"\) += \d", call.text):
        return None, ""
    opened = re.match(r"\w+<([^>]*)>", call.text)
    here = opened[1] if opened else ""
    paths = [os.path.join(here, text) for text in re.findall(r'"([^"]*)"', call.text)]
    if call.name == "openat" and "O_EXCL" in call.text:
        return Step("create", paths[0]), ""
    if call.name in ("linkat", "renameat2"):
        return Step("name", paths[1]), paths[0]
    if call.name == "unlinkat":
        return Step("delete folder" if "AT_REMOVEDIR" in call.text else "delete", paths[0]), ""
    if call.name == "rmdir":
        return Step("delete folder", paths[0]), ""
    verbs = {"mkdirat": "make folder", "write": "write", "pwrite64": "write", "fsync": "sync", "fdatasync": "sync"}
    verb = verbs.get(call.name)
    return (Step(verb, paths[0] if verb == "make folder" else here) if verb else None), ""
