"""Reading a run without being it: nothing is joined, recorded or fenced."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from safepoint.ambient import Ambient, SystemAmbient
from safepoint.catalog import Generation, GenerationState, examine, read_lineage
from safepoint.checkpoints import Checkpoint, list_checkpoints
from safepoint.contract import UNCHANGED, Contract
from safepoint.errors import MismatchError, NotFoundError, RequestError, advise
from safepoint.format.asked import Asked, asked_of, told
from safepoint.format.manifest import Manifest
from safepoint.format.names import GenerationName
from safepoint.restoring.match import Choice
from safepoint.restoring.outcome import RestoreReport
from safepoint.restoring.restore import RestoreContext, Restored, restore
from safepoint.restoring.select import Wish
from safepoint.state.item import STREAMS_ITEM, Item
from safepoint.state.placement import undisturbed_streams
from safepoint.state.registry import Registry
from safepoint.storage.base import Storage
from safepoint.storage.url import open_storage

_WHOLE = (GenerationState.COMMITTED, GenerationState.SUPERSEDED)


class Run:
    """Read the checkpoints of a run that some other process may be training."""

    def __init__(self, storage: Storage, ambient: Ambient) -> None:
        self._storage = storage
        self._ambient = ambient

    def checkpoints(self) -> list[Checkpoint]:
        """Return the usable checkpoints, newest first."""
        return list_checkpoints(self._storage)

    def manifest(self, step: int | str | None = None) -> Manifest:
        """Return the manifest of the newest checkpoint, of a step, or of a generation's name, of whatever lineage.

        Raises:
            NotFoundError: There is none.
        """
        asked = None if step is None else asked_of(step)
        if isinstance(asked, GenerationName):
            named = examine(self._storage, asked, read_lineage(self._storage, needs_chain=False))
            if named.state in _WHOLE and named.manifest is not None:
                return named.manifest
        checkpoints = self.checkpoints()
        for checkpoint in checkpoints:
            if asked is None or checkpoint.step == asked:
                found = self._examine(checkpoint.generation)
                if found.manifest is not None:
                    return found.manifest
        steps = ", ".join(str(number) for number in sorted({checkpoint.step for checkpoint in checkpoints}))
        raise NotFoundError(
            "no checkpoint matches",
            where=self._storage.url,
            expected=_wanted(asked),
            found=f"steps {steps}" if steps else "no checkpoint",
        )

    def load(
        self, into: Mapping[str, object], *, step: int | str | None = None, permit: Iterable[str] = ()
    ) -> RestoreReport:
        """Load items into live objects, by item name; the other items of the checkpoint are left alone.

        Global random streams are not touched. Parameters are written in place.

        Args:
            into: Live objects by the item names they were saved under, such as ``{"model": model}``.
            step: The step to load, or a generation's name; the newest good one if absent.
            permit: Words of differences to accept, such as ``model.removed``.

        Raises:
            NotFoundError: No checkpoint matches.
            MismatchError: An item does not fit, or none of those named is in the checkpoint; nothing was touched.
            CorruptionError: Only damaged checkpoints were found.
        """
        if not isinstance(into, Mapping) or not into:
            expected = 'live objects by item name, such as {"model": model}'
            raise RequestError("nothing is to be loaded", where="into", expected=expected, found=type(into).__name__)
        registry = Registry()
        for name, entry in into.items():
            registry.add(name, entry)
        context = RestoreContext(
            storage=self._storage,
            ambient=self._ambient,
            items={name: registry.items[name] for name in into},
            contract=Contract("approximate", frozenset(permit)),
            conditions=None,
            undisturbed=undisturbed_streams,
        )
        asked = None if step is None else asked_of(step)
        wish = Wish(asked, branch=asked is not None, required=True)
        lineage = read_lineage(self._storage, needs_chain=step is None)
        try:
            restored = restore(context, lineage, wish, Choice(only=frozenset(into)))
        except MismatchError as exc:
            self._advise(exc)
            raise
        _check_any_is_loaded(restored, context.items)
        return restored.report(step=0 if restored.saved is None else restored.saved.manifest.step, replayed=0)

    def _advise(self, error: MismatchError) -> None:
        """Say what helps a load, which has no choice of items but the names that it is given."""
        if GenerationName.parse(error.where) is None or not error.remedy.startswith(UNCHANGED):
            return
        manifest = self._examine(error.where).manifest
        words = sorted({repr(one.word) for one in error.differences if not one.word.endswith((".added", ".type"))})
        permits = "{" + ", ".join(words) + "}"
        fitting = f" Make the objects fit, or accept what differs with load(..., permit={permits})." if words else ""
        advise(error, UNCHANGED + ("" if manifest is None else f" {_names_in(manifest)}") + fitting)

    def _examine(self, generation: str) -> Generation:
        name = GenerationName.parse(generation)
        if name is None:
            raise RequestError("not the name of a generation", found=repr(generation))
        return examine(self._storage, name, read_lineage(self._storage))


def open_run(url: str | os.PathLike[str], *, storage: Storage | None = None, ambient: Ambient | None = None) -> Run:
    """Open a run for reading, without joining it.

    Args:
        url: The run's folder or URL.

    Raises:
        NotFoundError: There is no run; nothing is created.
    """
    storage = storage or open_storage(url)
    if not storage.root_exists() or read_lineage(storage, needs_chain=False).run is None:
        raise NotFoundError("there is no run here", where=storage.url, remedy="Check the path.")
    return Run(storage, ambient or SystemAmbient())


def _check_any_is_loaded(restored: Restored, items: Mapping[str, Item]) -> None:
    """Raise `MismatchError` where permits have let a load end that has filled nothing."""
    saved = restored.saved
    if saved is None or any(name in saved.items and saved.items[name].type == items[name].type for name in items):
        return
    raise MismatchError(
        "nothing was loaded: the checkpoint holds none of the items that were named, or each as another type",
        where=saved.manifest.generation,
        found=", ".join(f"{name!r} ({item.type})" for name, item in items.items()),
        remedy=f"{UNCHANGED} {_names_in(saved.manifest)}",
    )


def _names_in(manifest: Manifest) -> str:
    names = ", ".join(repr(name) for name in manifest.items if name != STREAMS_ITEM)
    return f"The checkpoint holds the items {names or 'none'}: name live objects as they were saved."


def _wanted(asked: Asked | None) -> str:
    return "any committed checkpoint" if asked is None else f"a committed checkpoint of {told(asked)}"
