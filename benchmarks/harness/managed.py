"""safepoint as it is measured: through its public names only."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import safepoint as sp


class Managed:
    """Hold a manager that has joined a run, and save and restore with it.

    Args:
        folder: The run's folder.
        items: What is saved.
        options: Of the manager.
    """

    def __init__(self, folder: Path, items: Mapping[str, object], **options: object) -> None:
        self._folder = folder
        self._items = dict(items)
        self.manager = sp.CheckpointManager(folder, self._items, **options)
        self.manager.restore()

    def mark(self) -> None:
        """Mark the boundary of an update."""
        self.manager.after_update()

    def save(self) -> sp.SaveHandle:
        """Save this boundary."""
        return self.manager.save()

    def generations(self) -> list[Path]:
        """Return the folders of the checkpoints, oldest first."""
        return sorted((self._folder / "generations").iterdir())

    def forget(self, *, keeps: int = 0) -> None:
        """Delete all checkpoints but the newest so many; not the manager's own doing, so that it is not measured."""
        found = self.generations()
        for path in found[: len(found) - keeps]:
            shutil.rmtree(path)

    def close(self) -> None:
        """Let the run go."""
        self.manager.close()


def restore(folder: Path, items: Mapping[str, object]) -> sp.CheckpointManager:
    """Make a manager, restore the newest checkpoint in place, every byte verified, and return the manager."""
    manager = sp.CheckpointManager(folder, dict(items))
    report = manager.restore(required=True)
    if report.is_fresh:
        raise RuntimeError("nothing was restored")
    return manager
