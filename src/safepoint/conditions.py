"""The conditions of a job: everything that a later restore compares with its own.

Configuration and structure are taken when an item is registered, before anything is restored, so that two starts of one
program compare what the program set, not how far it came.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, Protocol, runtime_checkable

import msgspec

from safepoint import __version__
from safepoint.ambient import Ambient
from safepoint.boundary import Boundary
from safepoint.contract import DERIVED, LEFT, Contract, Reason, lacking
from safepoint.data.cursor import Replay
from safepoint.errors import ContractError, Difference, InternalError
from safepoint.format.digest import digest_bytes
from safepoint.format.manifest import Conditions, Manifest, ProgressRecord
from safepoint.format.plain import encode_plain
from safepoint.passes import Position
from safepoint.progress import Progress
from safepoint.restoring.restore import Restored
from safepoint.restoring.validate import SavedState
from safepoint.saving.capture import Snapshot, capture
from safepoint.state.afterwards import Afterwards
from safepoint.state.environment import describe
from safepoint.state.item import STREAMS_ITEM, Item
from safepoint.state.randomness import GlobalRandomItem, RandomStreams
from safepoint.state.registry import Registry

# What one-cycle and cyclic schedules write into the groups of their optimizer.
_CYCLED = frozenset({"lr", "momentum", "betas"})

_DERIVED_AT = f"{DERIVED}_at"

_log = logging.getLogger(__name__)


@runtime_checkable
class Configured(Protocol):
    """An item with settings that the program chose."""

    def configuration(self) -> object:
        """Return the settings as a plain value."""


@runtime_checkable
class Structured(Protocol):
    """An item with a structure."""

    def structure(self) -> object:
        """Return the structure as a plain value."""


@runtime_checkable
class Counted(Protocol):
    """An item that counts its own steps."""

    def count(self) -> int | None:
        """Return how many steps the live object has counted; None if it does not count."""


@dataclass(slots=True)
class Registration:
    """Hold what items were like when they were registered."""

    configuration: dict[str, Any] = field(default_factory=dict)
    structure: dict[str, str] = field(default_factory=dict)

    def add(self, item: Item) -> None:
        """Note an item's configuration and structure."""
        if isinstance(item, Configured):
            settings = encode_plain(item.configuration(), path=f"{item.name} (configuration)")
            self.configuration[item.name] = {"kind": item.type, "settings": settings}
        if isinstance(item, Structured):
            tree = encode_plain(item.structure(), path=f"{item.name} (structure)")
            self.structure[item.name] = digest_bytes(msgspec.json.encode(tree))


class Circumstances:
    """Tell the conditions of now, and what only the live objects know of a restore's promise.

    Args:
        registry: The live objects and their items.
        boundary: Where the run stands.
        world_size: Number of ranks.
        config: The user's own settings, in the plain form in which they are stored.
        accumulation: Microbatches per update, if declared.
        contract: What is asked of a restore.
        ambient: Gives the environment's switches.
    """

    def __init__(
        self,
        registry: Registry,
        boundary: Boundary,
        contract: Contract,
        *,
        world_size: int,
        config: object,
        accumulation: int | None,
        ambient: Ambient,
    ) -> None:
        self._contract = contract
        self._ambient = ambient
        self._registry = registry
        self._boundary = boundary
        self._world_size = world_size
        self._config = config
        self._declared = accumulation
        self._saved_accumulation: int | None = None
        self._registration = Registration()
        self._short: int | None = None
        # Of each item it is asked once whether it counts: that takes longer than to ask it for its count.
        self._counted: dict[str, Counted] = {}
        self._schedulers: dict[str, Counted] = {}
        self._schedules: dict[str, int | None] = {}
        self._late: set[str] = set()
        self.afterwards = Afterwards(with_tensors=world_size == 1)
        # At which step the streams of an item were last derived for another number of ranks.
        self._derived: dict[str, int] = {}
        self._warned: set[str] = set()

    def add(self, item: Item) -> None:
        """Note an item as it is registered."""
        self._registration.add(item)
        if isinstance(item, Counted):
            self._counted[item.name] = item
            if item.type == "scheduler":
                self._schedulers[item.name] = item
                self._schedules[item.name] = item.count()

    def forget(self, name: str) -> None:
        """Forget an item that could not be given its state, everywhere."""
        self._registration.configuration.pop(name, None)
        self._registration.structure.pop(name, None)
        self._counted.pop(name, None)
        self._schedulers.pop(name, None)
        self._boundary.unwatch(name, self._registry.objects[name])
        self._registry.remove(name)

    def environment(self) -> dict[str, str]:
        """Return versions, devices and switches of now."""
        workspace = self._ambient.variable("CUBLAS_WORKSPACE_CONFIG")
        return {
            **describe(self._registry.objects.values(), workspace=workspace, glances=self._registry.glances),
            "safepoint": __version__,
        }

    def now(self) -> Conditions:
        """Return the conditions of now."""
        objects = self._registry.objects
        batches = [
            batch for entry in objects.values() if isinstance(batch := getattr(entry, "global_batch", None), int)
        ]
        return Conditions(
            world_size=self._world_size,
            global_batch=batches[0] if batches else None,
            accumulation=self._declared or self._boundary.longest_window or None,
            environment=self.environment(),
            structure=dict(self._registration.structure),
            configuration=self._configuration(),
            datasets={name: _identity(entry) for name, entry in objects.items() if is_dataclass(_identity_of(entry))},
            config=self._config,
            counts=self._counts(),
            reasons=self._reasons(),
        )

    def snapshot(self, *, metrics: Mapping[str, float], probe: object, streams: RandomStreams) -> Snapshot:
        """Return everything that belongs to the boundary we stand on; the tensors still lie in live memory.

        To tell their state, items may draw from the global random streams: `streams` are those of the boundary.

        Raises:
            RequestError: A value cannot be stored; named by its path.
        """
        progress = self._boundary.progress
        captured = {**self._registry.items, STREAMS_ITEM: GlobalRandomItem(streams=streams)}
        with self._registry.glances.shared():
            items = capture(list(captured.values()), told=self._registry.look_anew_after)
            conditions = self.now()
        self._warn_of(conditions.reasons)
        return Snapshot(
            progress=ProgressRecord(**{name: getattr(progress, name) for name in ProgressRecord.__struct_fields__}),
            items=items,
            conditions=conditions,
            metrics={name: encode_plain(value) for name, value in metrics.items()},
            probe=encode_plain(probe, path="probe"),
            contract=self._contract.level,
            kinds=self._registry.kinds,
            consumed=self._boundary.consumed,
            accepts=self._contract.accepts,
        )

    def reasons_for(self, manifest: Manifest) -> list[Reason]:
        """Return what the live objects know of the promise: the replay policy of external inputs."""
        reasons = []
        for name, entry in self._registry.objects.items():
            replay = getattr(entry, "replay", None)
            if isinstance(replay, Replay) and replay.level != "exact":
                reasons.append(Reason("replay", replay.level, f"{name}: {replay.reason}", "", ""))
        return reasons

    def resume(self, restored: Restored, *, late: frozenset[str]) -> None:
        """Stand on the boundary of a restored checkpoint, and remember what the first updates are compared with.

        Raises:
            InternalError: A restored item has counted other steps than the checkpoint states.
        """
        manifest = None if restored.saved is None else restored.saved.manifest
        if manifest is not None:
            # A boundary lies inside no window, so no gradient belongs to it.
            self._registry.drop_gradients(manifest.items.keys() - set(restored.left_fresh) - late)
            if not restored.left_fresh and not restored.promise.reasons:
                self._check_counts(manifest)
            if not self._has_position(manifest):
                restored.notes.append("nothing tells a position in the data: a loader gives its batches from the start")
        self._saved_accumulation = None if manifest is None else manifest.conditions.accumulation
        self._short = None
        self._late.clear()
        self.afterwards.forget()
        self._derived = {} if restored.saved is None else _derivations(restored.saved)
        self._boundary.begin_at(
            Progress() if manifest is None else _progress_of(manifest.progress),
            {} if manifest is None else manifest.conditions.counts,
        )
        self.note_schedules()

    def check_accumulation(self) -> None:
        """Compare the windows seen since a restore with those of the saved run.

        Raises:
            ContractError: An update has another number of microbatches, and the contract does not permit it.
        """
        saved, seen, progress = self._saved_accumulation, self._boundary.longest_window, self._boundary.progress
        if saved is None or self._declared is not None or not seen:
            return
        # The last window of an epoch may be short. A loader that does not tell its length shows only afterwards
        # whether it was the last one.
        is_first_short = not self._boundary.tells_length and self._short != progress.epoch
        if seen < saved and (progress.epoch_end_due or is_first_short):
            self._short = progress.epoch
            return
        self._saved_accumulation = None
        reason = Reason("accumulation", "approximate", "microbatches per update", str(saved), str(seen))
        if seen != saved and not self._contract.accepts(reason):
            raise ContractError(
                "the continued run makes its updates of another number of microbatches",
                where=f"update {progress.step}",
                expected=str(saved),
                found=str(seen),
                differences=[Difference(reason.word, reason.subject, reason.saved, reason.current)],
                remedy="The update is made. Go back with restore() and the saved number, or permit 'accumulation'.",
            )

    def note_schedules(self) -> None:
        """Remember how far the schedulers are at a boundary."""
        self._schedules = self._schedule_counts()

    def check_schedules(self) -> None:
        """Note the schedulers that were stepped after a boundary instead of before it.

        What follows an epoch's last update stands between two boundaries: `end_epoch` closes it.
        """
        if not self._boundary.progress.epoch_end_due:
            self._late |= self._moved_schedules()

    def watch_afterwards(self, which: Afterwards | None = None, *, streams: RandomStreams | None = None) -> None:
        """Look from a save on at what moves before the next batch: a resumed run does not do it."""
        (which or self.afterwards).watch(self._registry.objects, streams)

    def _check_counts(self, manifest: Manifest) -> None:
        for name, saved in manifest.conditions.counts.items():
            item = self._counted.get(name)
            if item is not None and item.count() != saved:
                raise InternalError(
                    "a restored item has counted other steps", where=name, expected=saved, found=item.count()
                )

    def _warn_of(self, reasons: Mapping[str, str]) -> None:
        """Say once, while the run can still be changed, why a restore of what is saved will be refused."""
        refused = set(lacking(reasons, self._contract.accepts))
        for word in sorted(refused - self._warned):
            _log.warning("what is saved here will be refused by the contract: %s (%r)", reasons[word], word)
        self._warned |= refused

    def _configuration(self) -> dict[str, Any]:
        """Return all settings; those that a schedule overwrites in its optimizer when it is made are the schedule's."""
        settings = dict(self._registration.configuration)
        for entry in self._registry.objects.values():
            for name, optimizer in self._registry.optimizers.items():
                if getattr(entry, "optimizer", None) is optimizer and _overwrites(entry):
                    settings[name] = _left_to_schedule(settings[name])
        return settings

    def _counts(self) -> dict[str, int]:
        counts = {name: count for name, item in self._counted.items() if (count := item.count()) is not None}
        return {**counts, **self._boundary.counts(), **self._derived}

    def _reasons(self) -> dict[str, str]:
        reasons = {}
        if self._boundary.ahead:
            reasons["data_ahead"] = f"{self._boundary.ahead} batches were handed out and not used when this was saved"
        if self._boundary.untold and not self._boundary.progress.epoch_end_due:
            untold = f"{self._boundary.untold} batches of this epoch"
            reasons["data_position"] = f"{untold} came from a loader that is no item: its position is not saved"
        elif self._boundary.progress.samples and not self._tells_position():
            reasons["data_position"] = "samples were counted, and nothing tells where in the data the run is"
        if self._boundary.foreign_workers and not self._boundary.progress.epoch_end_due:
            reasons["rng"] = "the random streams of a foreign loader's workers are not saved"
        if self._boundary.progress.epoch_end_due:
            if self._moved_schedules() or (self._boundary.leaves_epochs_open and self._has_epoch_schedule()):
                reasons["epoch_end"] = "saved between an epoch's last update and its end; call end_epoch()"
        else:
            self._late |= self._moved_schedules()
        for name in sorted(self._late):
            remedy = "step it before that, or close the epoch with end_epoch() where it steps once an epoch"
            reasons[f"{name}.late"] = f"{name!r} was stepped after after_update(): {remedy}"
        return {**reasons, **self.afterwards.reasons}

    def _tells_position(self) -> bool:
        """Return whether an item or a pass has told a position in the data; only they count epochs."""
        counts, progress = self._boundary.counts(), self._boundary.progress
        passes = progress.epoch or progress.epoch_end_due or counts["foreign_in_epoch"]
        # Of an input that keeps its position to itself, nobody sees whether it moves.
        keeps_to_itself = any(not isinstance(one, Position) for one in self._inputs())
        return bool(passes) or self._boundary.has_moved or keeps_to_itself

    def _has_position(self, manifest: Manifest) -> bool:
        """Return whether the saved run told a position in its data."""
        saved = manifest.progress
        passes = saved.epoch or saved.epoch_end_due or manifest.conditions.counts.get("foreign_in_epoch", 0)
        return bool(passes) or bool(self._inputs())

    def _inputs(self) -> list[object]:
        """Return the items that are inputs: those with a position that can be seen, and those that are iterated."""
        names = [name for name, item in self._registry.items.items() if item.type == "stateful"]
        return [one for name in names if isinstance(one := self._registry.objects[name], Position | Iterable)]

    def _schedule_counts(self) -> dict[str, int | None]:
        return {name: item.count() for name, item in self._schedulers.items()}

    def _moved_schedules(self) -> set[str]:
        """Return the schedulers that have stepped since the last boundary."""
        now = self._schedule_counts()
        return {name for name, count in self._schedules.items() if name in now and now[name] != count}

    def _has_epoch_schedule(self) -> bool:
        """Return whether a scheduler counts far fewer steps than there were updates: it is stepped once an epoch."""
        step = self._boundary.progress.step
        counts = [count for count in self._schedule_counts().values() if count is not None]
        return any(count < step and count <= self._boundary.progress.epoch for count in counts)


def _overwrites(schedule: object) -> bool:
    """Return whether a schedule sets rate and momentum of its own, whatever the optimizer was made with."""
    inner = getattr(schedule, "_schedulers", ())
    return hasattr(schedule, "cycle_momentum") or any(_overwrites(one) for one in inner)


def _left_to_schedule(settings: Any) -> Any:
    groups = [
        {**group, "options": {key: LEFT if key in _CYCLED else one for key, one in group["options"].items()}}
        for group in settings["settings"]["groups"]
    ]
    return {**settings, "settings": {**settings["settings"], "groups": groups}}


def _derivations(saved: SavedState) -> dict[str, int]:
    """Return at which step the streams of each item were last derived, this restore included."""
    before = {name: step for name, step in saved.manifest.conditions.counts.items() if name.endswith(_DERIVED_AT)}
    return {**before, **{f"{name}{_DERIVED_AT}": saved.manifest.step for name in saved.derived}}


def _progress_of(record: ProgressRecord) -> Progress:
    return Progress(**{name: getattr(record, name) for name in ProgressRecord.__struct_fields__})


def _identity_of(entry: object) -> object:
    return getattr(entry, "identity", None)


def _identity(entry: object) -> Any:
    return encode_plain(asdict(_identity_of(entry)))  # type: ignore[call-overload]  # the caller checked
