"""What a run ought to hold, said without the code that saves, restores and deletes.

The line is what the newest start descends from, oldest first. An entry of it is *sure* when its save was reported done,
*held* while the rule that keeps the newest two may not have let it go. A start must find the newest entry that is sure,
held and undamaged, or a newer one that is there by chance: a save whose report never came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Entry:
    """One generation with a manifest. Damage is hidden while the sizes of its files are right."""

    generation: str
    is_sure: bool = False
    is_held: bool = True
    is_damaged: bool = False
    hides_damage: bool = False

    @property
    def step(self) -> int:
        return int(self.generation[5:17])

    @property
    def looks_good(self) -> bool:
        return not self.is_damaged or self.hides_damage


@dataclass(slots=True)
class Ideal:
    """Follow what happens to a run."""

    line: list[Entry] = field(default_factory=list)
    strays: set[str] = field(default_factory=set)

    def knows(self, generation: str) -> bool:
        return generation in self.strays or self.entry(generation) is not None

    def entry(self, generation: str) -> Entry | None:
        return next((entry for entry in self.line if entry.generation == generation), None)

    def appeared(self, generation: str, *, is_by_newest: bool) -> None:
        """Take note of a manifest that was not there before: of the newest start, or of one that was fenced."""
        if is_by_newest:
            self.line.append(Entry(generation))
            self.line.sort(key=lambda entry: entry.generation)
        else:
            self.strays.add(generation)

    def reported(self, generation: str) -> None:
        """Take note that a save was reported done."""
        entry = self.entry(generation)
        assert entry is not None, f"{generation} was reported done, and the newest start does not descend from it"
        entry.is_sure = True

    def swept(self, is_there: Callable[[str], bool], unknown: Iterable[str] = ()) -> None:
        """Take note that retention may have let go all but the newest two that look good."""
        counted = [
            entry
            for entry in self.line
            if entry.looks_good and entry.generation not in unknown and is_there(entry.generation)
        ]
        for entry in self.line:
            entry.is_held = entry.is_held and (entry in counted[-2:] or not entry.looks_good)

    @property
    def floor(self) -> Entry | None:
        """Return the entry that no start may fall behind."""
        sound = [entry for entry in self.line if entry.is_sure and entry.is_held and not entry.is_damaged]
        return sound[-1] if sound else None

    @property
    def allowed(self) -> set[str | None]:
        """Return what a start may resume; None stands for a fresh start."""
        floor = self.floor
        at = self.line.index(floor) if floor is not None else -1
        newer = {entry.generation for entry in self.line[at + 1 :] if not entry.is_damaged}
        return newer | {floor.generation if floor is not None else None}

    def resumed(self, generation: str | None) -> None:
        """Take note of what a start goes on from."""
        step = int(generation[5:17]) if generation is not None else 0
        self.strays |= {entry.generation for entry in self.line if entry.step > step}
        self.line = [entry for entry in self.line if entry.step <= step]
