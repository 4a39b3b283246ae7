"""What a run asks of a restore, and what a particular restore can keep.

`judge` is pure: it compares the conditions recorded at the save with those of now and gives a promise with its reasons.

1. A promise's level is the lowest of its reasons' levels; without reasons it is ``exact``.
2. A reason below the contract's level refuses the restore, unless its word is permitted.
3. Whatever differs is a reason, permitted or not, also when it lowers nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from safepoint.errors import RequestError
from safepoint.format.manifest import Conditions, Manifest

Level = Literal["exact", "same_data", "approximate"]
Keep = Literal["saved", "current"]
Rule = Literal["refuse", "derive"]

LEVELS: tuple[Level, ...] = ("approximate", "same_data", "exact")
WORDS = frozenset(
    {"world_size", "global_batch", "accumulation", "workers", "versions", "device", "determinism", "dataset"}
    | {"config", "scheduler", "rng", "probe", "epoch_end", "data_ahead", "data_position", "replay", "replicas"}
    | {"topology"}
)
# How the word of an item ends whose random streams were derived.
DERIVED = ".derived"
# How the word ends of what each rank had of its own, and no other rank can be given.
PER_RANK = ".per_rank"
# How a remedy begins as long as no live object was written to; a restore that has written says so in its place.
UNCHANGED = "Nothing was changed."
_SAVED_LEVELS: dict[str, Level] = {"epoch_end": "same_data", "rng": "same_data", "rng.late": "same_data"}
# Stands in an optimizer's configuration for what its schedule decides.
LEFT = "left to the schedule"
_VERSIONS = frozenset({"python", "implementation", "torch", "numpy", "cuda", "hip", "cudnn", "safepoint"})
_DEVICE = frozenset({"device", "gpu", "cpu_capability", "machine", "threads", "interop_threads"})


@dataclass(frozen=True, slots=True)
class Permit:
    """Permit a difference and say which side wins."""

    word: str
    keep: Keep = "saved"


def permit(word: str, *, keep: Keep) -> Permit:
    """Permit a difference: ``keep="saved"`` restores the checkpoint's value, ``"current"`` leaves the live one.

    Raises:
        RequestError: The word or the side is not one there is.
    """
    if keep not in ("saved", "current"):
        sides = "'saved' or 'current'"
        raise RequestError("a permit keeps one of two sides", where=str(word), expected=sides, found=repr(keep))
    return Permit(_check_word(word), keep)


@dataclass(frozen=True, slots=True)
class Contract:
    """State what a restore must keep, and which changes it accepts.

    Args:
        level: ``exact``, ``same_data`` or ``approximate``; a restore that can only keep less refuses.
        permit: Words of differences that are accepted although they lower the promise: ``world_size``,
            ``global_batch``, ``accumulation``, ``workers``, ``versions``, ``device``, ``determinism``, ``dataset``,
            ``config``, ``scheduler``, ``rng``, ``probe``, ``epoch_end``, ``data_ahead``, ``data_position``,
            ``replay``, ``topology``, and ``<item>.<what>`` such as ``model.added`` or ``optimizer.lr``. A bare
            ``optimizer.lr`` or ``scheduler`` takes what the program sets; `permit(word, keep=...)` says which side
            wins.
        rng: On another number of ranks, ``derive`` begins new random streams for each rank, made of the saved ones;
            ``refuse`` names what has no owner.

    Raises:
        RequestError: An unknown level, word or rule.
    """

    level: Level = "exact"
    permit: Iterable[str | Permit] = ()
    rng: Rule = "refuse"

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise RequestError("a contract has an unknown level", expected=", ".join(LEVELS), found=repr(self.level))
        if self.rng not in ("refuse", "derive"):
            rules = "'refuse' or 'derive'"
            raise RequestError("a contract has an unknown rule for streams", expected=rules, found=repr(self.rng))
        if isinstance(self.permit, str):
            words = f"{{{self.permit!r}}}"
            raise RequestError("a contract's permits are a set of words", expected=words, found=repr(self.permit))
        permits = frozenset(
            entry if isinstance(entry, Permit) else Permit(_check_word(entry), side_of_bare(entry))
            for entry in self.permit
        )
        object.__setattr__(self, "permit", permits)

    @property
    def words(self) -> frozenset[str]:
        """Return the permitted words."""
        return frozenset(entry.word for entry in self.permit if isinstance(entry, Permit))

    @property
    def current(self) -> frozenset[str]:
        """Return the words for which the live value wins."""
        return frozenset(entry.word for entry in self.permit if isinstance(entry, Permit) and entry.keep == "current")

    def accepts(self, reason: Reason) -> bool:
        """Return whether a restore may go on in spite of a reason.

        What each rank had of its own is only left out by its word, whatever the level.
        """
        if reason.word.endswith(PER_RANK):
            return reason.word in self.words
        is_derived = self.rng == "derive" and reason.word.endswith(DERIVED)
        return is_derived or LEVELS.index(reason.level) >= LEVELS.index(self.level) or reason.word in self.words


@dataclass(frozen=True, slots=True)
class Reason:
    """Name one thing that differs, and how far it lowers the promise (``exact``: not at all)."""

    word: str
    level: Level
    subject: str
    saved: str
    current: str

    def __str__(self) -> str:
        sides = f": saved {self.saved}, now {self.current}" if self.saved or self.current else ""
        effect = "" if self.level == "exact" else f" → {self.level}"
        return f"{self.subject}{sides}{effect}"


@dataclass(frozen=True, slots=True)
class Promise:
    """State what the continued run keeps, with all reasons."""

    level: Level
    reasons: tuple[Reason, ...] = ()

    def __str__(self) -> str:
        return self.level


def judge(saved: Conditions, current: Conditions, *, further: Sequence[Reason] = ()) -> Promise:
    """Return the promise that a restore keeps under the conditions of now.

    Args:
        saved: The conditions recorded in the manifest.
        current: The conditions of the live job.
        further: Reasons found elsewhere: by the items, the data position, the user's probe.
    """
    reasons = [*_batch_reasons(saved, current), *_environment_reasons(saved.environment, current.environment)]
    reasons += _tree_reasons("dataset", "approximate", "data set", saved.datasets, current.datasets)
    for item in sorted(saved.structure.keys() & current.structure.keys()):
        if saved.structure[item] != current.structure[item]:
            digests = saved.structure[item], current.structure[item]
            reasons.append(Reason(f"{item}.structure", "same_data", f"structure of {item!r}", *digests))
    reasons += configuration_reasons(saved.configuration, current.configuration)
    reasons += _tree_reasons("config", "approximate", "config", saved.config, current.config)
    reasons += [saved_reason(word, text) for word, text in saved.reasons.items()]
    reasons += further
    return Promise(lowest(reason.level for reason in reasons), tuple(reasons))


def saved_reason(word: str, text: str) -> Reason:
    """Return the reason that a checkpoint itself records for a promise that it cannot keep."""
    return Reason(word, _SAVED_LEVELS.get(word, "approximate"), text, "", "")


def lacking(reasons: Mapping[str, str], accepts: Callable[[Reason], bool]) -> dict[str, str]:
    """Return those reasons that a checkpoint records of itself, by their words, which are not accepted."""
    return {word: text for word, text in sorted(reasons.items()) if not accepts(saved_reason(word, text))}


def needed_words(manifest: Manifest) -> dict[str, str]:
    """Return the words that a start has to permit, each with its reason, as far as the checkpoint tells them of itself.

    It tells the level that its run asked for, and not which words that run permitted.
    """
    level: Level = next((level for level in LEVELS if level == manifest.contract), "exact")
    return lacking(manifest.conditions.reasons, Contract(level).accepts)


def lowest(levels: Iterable[Level]) -> Level:
    """Return the lowest of some levels; ``exact`` for none."""
    return LEVELS[min((LEVELS.index(level) for level in levels), default=len(LEVELS) - 1)]


def configuration_reasons(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[Reason]:
    """Return a reason for each setting of an optimizer or scheduler that was configured otherwise at the save.

    Configuration is what the program set before anything was restored, so that a schedule at work is no difference. A
    setting's word is ``<item>.<setting>`` for optimizers and ``scheduler`` for schedulers. A setting that either side
    leaves to a schedule is compared as the schedule's.
    """
    reasons: list[Reason] = []
    for item in sorted(saved.keys() & current.keys()):
        kind = saved[item].get("kind")
        for place, old, new in differing_leaves(saved[item], current[item]):
            if repr(LEFT) in (old, new):
                continue
            word = "scheduler" if kind == "scheduler" else f"{item}.{place.split('.')[-1].split('[')[0]}"
            reasons.append(Reason(word, "same_data", f"{item} configuration {place}", old, new))
    return reasons


def differing_leaves(saved: Any, current: Any, place: str = "") -> list[tuple[str, str, str]]:
    """Return (place, saved, current) for each leaf in which two JSON trees differ; an absent one reads ``absent``."""
    if _are_same(saved, current):
        return []
    if isinstance(saved, dict) and isinstance(current, dict) and not _is_tagged(saved) and not _is_tagged(current):
        found = []
        for key in [*saved, *(key for key in current if key not in saved)]:
            below = f"{place}.{key}" if place else str(key)
            if key not in saved:
                found.append((below, "absent", plain_text(current[key])))
            elif key not in current:
                found.append((below, plain_text(saved[key]), "absent"))
            else:
                found += differing_leaves(saved[key], current[key], below)
        return found
    if isinstance(saved, list) and isinstance(current, list) and len(saved) == len(current):
        pairs = enumerate(zip(saved, current, strict=True))
        return [leaf for n, (old, new) in pairs for leaf in differing_leaves(old, new, f"{place}[{n}]")]
    return [(place, plain_text(saved), plain_text(current))]


def plain_text(form: Any) -> str:
    """Return a stored value for people: a tagged float as a number, anything else as it stands."""
    if isinstance(form, dict) and set(form) == {"$float"}:
        text = str(form["$float"])
        return repr(float(text) if text in ("nan", "inf", "-inf") else float.fromhex(text))
    if isinstance(form, dict) and _is_tagged(form):
        ((tag, payload),) = form.items()
        return f"{tag[1:]} {plain_text(payload)}"
    if isinstance(form, dict):
        return "{" + ", ".join(f"{key!r}: {plain_text(value)}" for key, value in form.items()) + "}"
    if isinstance(form, list):
        return "[" + ", ".join(plain_text(element) for element in form) + "]"
    return repr(form)


def side_of_bare(word: str) -> Keep:
    """Return the side that a word without `permit` keeps: who permits a setting to change wants the new one."""
    return "current" if "." in word or word == "scheduler" else "saved"


def _are_same(saved: Any, current: Any) -> bool:
    """Compare two JSON trees by type and value: 1 and true are equal to Python, and not to a reader."""
    if type(saved) is not type(current):
        return False
    if isinstance(saved, dict):
        return saved.keys() == current.keys() and all(_are_same(saved[key], current[key]) for key in saved)
    if isinstance(saved, list):
        return len(saved) == len(current) and all(map(_are_same, saved, current))
    return bool(saved == current)


def _is_tagged(form: dict[str, Any]) -> bool:
    return len(form) == 1 and next(iter(form)).startswith("$")


def _batch_reasons(saved: Conditions, current: Conditions) -> list[Reason]:
    reasons = []
    same_batch = saved.global_batch == current.global_batch
    per_update = [_samples_per_update(saved, current), _samples_per_update(current, saved)]
    is_update_kept = None not in per_update and per_update[0] == per_update[1]
    kept: Level = "same_data" if is_update_kept or (same_batch and saved.global_batch is not None) else "approximate"
    if saved.world_size != current.world_size:
        sizes = str(saved.world_size), str(current.world_size)
        reasons.append(Reason("world_size", kept, "world size", *sizes))
        reasons += _update_reasons(saved, current)
    if not same_batch:
        batches = str(saved.global_batch), str(current.global_batch)
        level: Level = kept if is_update_kept else "approximate"
        reasons.append(Reason("global_batch", level, "global batch", *batches))
    if None not in (saved.accumulation, current.accumulation) and saved.accumulation != current.accumulation:
        windows = str(saved.accumulation), str(current.accumulation)
        reasons.append(Reason("accumulation", kept, "microbatches per update", *windows))
    return reasons


def _update_reasons(saved: Conditions, current: Conditions) -> list[Reason]:
    """Return what an update means on another number of ranks, where that is known and another thing."""
    before, now = _samples_per_update(saved, current), _samples_per_update(current, saved)
    if before is None or now is None or current.global_batch is None or before == now:
        return []
    windows, rest = divmod(before, current.global_batch)
    advice = f"accumulation={windows} keeps them" if windows and not rest else "no accumulation keeps them"
    reasons = [Reason("global_batch", "approximate", "samples per update", str(before), f"{now} ({advice})")]
    if any(setting.get("kind") == "scheduler" for setting in saved.configuration.values()):
        of = "samples between two steps of a schedule that counts updates"
        reasons.append(Reason("global_batch", "approximate", of, str(before), str(now)))
    return reasons


def _samples_per_update(conditions: Conditions, other: Conditions) -> int | None:
    """Return what one update consumes over all ranks; an accumulation that is not known is taken to be the other's."""
    if conditions.global_batch is None:
        return None
    return conditions.global_batch * (conditions.accumulation or other.accumulation or 1)


def _environment_reasons(saved: Mapping[str, str], current: Mapping[str, str]) -> list[Reason]:
    reasons = []
    for key in [*saved, *(key for key in current if key not in saved)]:
        old, new = saved.get(key, "absent"), current.get(key, "absent")
        if old == new:
            continue
        word = "versions" if key in _VERSIONS else "device" if key in _DEVICE else "determinism"
        # safepoint itself computes nothing of the training: its version is told, and lowers nothing.
        level: Level = "exact" if key == "safepoint" else "same_data"
        reasons.append(Reason(word, level, key, old, new))
    return reasons


def _tree_reasons(word: str, level: Level, subject: str, saved: Any, current: Any) -> list[Reason]:
    leaves = differing_leaves(saved, current)
    return [Reason(word, level, f"{subject} {place}".rstrip(), old, new) for place, old, new in leaves]


def _check_word(word: object) -> str:
    if not isinstance(word, str) or (word not in WORDS and "." not in word.strip(".")):
        raise RequestError(
            "a contract permits an unknown word",
            expected=f"one of {', '.join(sorted(WORDS))}, or <item>.<what>",
            found=repr(word),
        )
    return word
