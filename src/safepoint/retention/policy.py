"""Which checkpoints stay: a pure decision that gives its reasons.

1. Only good checkpoints count: committed, whole, on the live lineage, with a known outcome. A damaged or superseded one
   never takes the place of a good one, and one whose outcome is unknown is neither counted nor deleted. A good one
   that a start off the lineage has marked is doubtful: each rule keeps it beside those that it keeps without it. Of
   several good ones of one step only the newest is counted.
2. Two good checkpoints that share no object always stay, whatever the policy says, or else nothing is deleted.
3. The newest one whose every byte was read back stays until a newer one was read back.
4. The newest one of which nothing is known that the contract refuses stays until there is a newer such one.
5. No clock is read. Ages are told by the times that the run's own saves recorded, and a wrong time keeps more, not
   less, wherever another time shows that it is wrong.

Spec: C12.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from safepoint.duration import duration_text, seconds_of
from safepoint.errors import RequestError

Standing = Literal["good", "doubtful", "damaged", "superseded", "unknown"]
Best = tuple[str, Literal["min", "max"]]

_MOST_LISTED = 8


@dataclass(frozen=True, slots=True)
class Keep:
    """State what is kept; see `keep`.

    Raises:
        RequestError: A value is out of range.
    """

    last: int
    every: int | None = None
    best: Best | None = None
    within_s: float | None = None

    def __post_init__(self) -> None:
        best = self.best
        if self.within_s is not None:
            seconds_of(self.within_s, option="keep(within=...)")
        if not _is_count(self.last):
            raise _unusable("last", "1 or more", self.last)
        if self.every is not None and not _is_count(self.every):
            raise _unusable("every", "1 or more", self.every)
        if best is not None and not (
            isinstance(best, tuple) and len(best) == 2 and isinstance(best[0], str) and best[1] in ("min", "max")
        ):
            raise _unusable("best", "(name, 'min' or 'max')", best)


def keep(
    last: int = 3,
    *,
    best: Best | None = None,
    every: int | None = None,
    within: str | float | datetime.timedelta | None = None,
) -> Keep:
    """Keep the newest checkpoints, the best one, one at regular steps and the recent ones; what one rule keeps stays.

    Two checkpoints that share nothing stay in any case, also with ``last=1``, and the newest one of which nothing is
    known that the contract refuses.

    Args:
        last: How many of the newest good checkpoints, at least 1; of several of one step the newest alone.
        best: A metric given to `after_update` and whether its ``min`` or ``max`` is best; a checkpoint without a finite
            value is never the best, and of equal ones the older stays.
        every: Keep, for each multiple of this number of steps, the first good checkpoint at or after it.
        within: Keep what was saved within this time before the newest ones, by the times that they recorded: text such
            as ``36h``, a `timedelta`, or seconds.

    Raises:
        RequestError: A value is out of range.
    """
    return Keep(last, every, best, None if within is None else seconds_of(within, option="keep(within=...)"))


@dataclass(frozen=True, slots=True)
class Candidate:
    """Hold what the policy needs to know of one generation.

    `objects` are those that its manifest names, as (generation, name), an ancestor's included. `saved_s` is when it was
    saved, as it says, in seconds since 1970; None where that cannot be read. `is_refused` tells that a start would be
    refused by what it says of itself.
    """

    generation: str
    step: int
    standing: Standing
    is_verified: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    objects: frozenset[tuple[str, str]] = frozenset()
    saved_s: float | None = None
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """Say whether a generation stays, and why."""

    generation: str
    step: int
    is_kept: bool
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{'keep' if self.is_kept else 'delete'} step {self.step}: {'; '.join(self.reasons)}"


def decide(candidates: Sequence[Candidate], policy: Keep, *, protected: Mapping[str, str]) -> list[Decision]:
    """Return a decision for each candidate, newest first.

    Args:
        candidates: All generations with a manifest that bear no tombstone, newest first.
        policy: What to keep.
        protected: Generations that stay whatever the policy says, each with the reason.

    Spec: C12.
    """
    good = [entry for entry in candidates if entry.standing == "good"]
    reasons: dict[str, list[str]] = {entry.generation: [] for entry in candidates}
    for generation, why in protected.items():
        if generation in reasons:
            reasons[generation].append(why)
    for generation, found in _kept_by_rules(good, policy).items():
        reasons[generation] += found
    _add_doubtful(candidates, policy, reasons)
    _add_others(candidates, good, policy, reasons)
    _add_second_copy(good, reasons)
    return [_decision(entry, good, reasons[entry.generation]) for entry in candidates]


def find_unmet(candidates: Sequence[Candidate], policy: Keep) -> str:
    """Return which rule keeps nothing, although there are good checkpoints; nothing where each rule keeps one."""
    good = _usable(candidates)
    if policy.best is None or not good:
        return ""
    metric = policy.best[0]
    if any(math.isfinite(entry.metrics.get(metric, math.nan)) for entry in good):
        return ""
    known = sorted({name for entry in good for name in entry.metrics})
    there = f"they have {', '.join(known[:_MOST_LISTED])}" if known else "they have no metrics"
    return f"no checkpoint has a finite value of {metric!r} yet, so none is kept as the best by it; {there}"


def has_two_copies(kept: Sequence[frozenset[tuple[str, str]]]) -> bool:
    """Return whether two of some sets of objects have nothing in common.

    Spec: C12.
    """
    return any(one.isdisjoint(other) for number, one in enumerate(kept) for other in kept[number + 1 :])


def _usable(candidates: Sequence[Candidate]) -> list[Candidate]:
    return [entry for entry in candidates if entry.standing in ("good", "doubtful")]


def _kept_by_rules(good: Sequence[Candidate], policy: Keep) -> dict[str, list[str]]:
    """Return for each of some good ones, newest first, why the policy's rules keep it; nothing where none does."""
    reasons: dict[str, list[str]] = {entry.generation: [] for entry in good}
    for number, entry in enumerate(_newest_of_steps(good)[: policy.last]):
        reasons[entry.generation].append("the newest" if number == 0 else f"among the last {policy.last}")
    if policy.every is not None:
        for generation, multiple in _regular(good, policy.every).items():
            reasons[generation].append(f"the first at or after step {multiple} (every {policy.every})")
    if policy.best is not None:
        _add_best(good, policy.best, reasons)
    if policy.within_s is not None:
        _add_recent(good, policy.within_s, reasons)
    verified = next((entry for entry in good if entry.is_verified), None)
    if verified is not None:
        reasons[verified.generation].append("the newest whose every byte was read back")
    accepted = next((entry for entry in good if not entry.is_refused), None)
    if accepted is not None and accepted is not good[0]:
        reasons[accepted.generation].append("the newest that says nothing of itself that the contract refuses")
    return reasons


def _newest_of_steps(good: Sequence[Candidate]) -> list[Candidate]:
    newest: dict[int, Candidate] = {}
    for entry in good:
        newest.setdefault(entry.step, entry)
    return list(newest.values())


def _unusable(name: str, expected: str, found: object) -> RequestError:
    return RequestError(
        "a retention policy is not usable", where=f"keep({name}=...)", expected=expected, found=repr(found)
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _regular(good: Sequence[Candidate], every: int) -> dict[str, int]:
    """Return the first good checkpoint at or after each multiple. The oldest wins, so that a choice never changes."""
    chosen: dict[int, str] = {}
    for entry in reversed(good):
        if entry.step >= every:
            chosen.setdefault(entry.step // every * every, entry.generation)
    return {generation: multiple for multiple, generation in chosen.items()}


def _add_best(good: Sequence[Candidate], best: Best, reasons: dict[str, list[str]]) -> None:
    metric, mode = best
    valued = [(entry.metrics[metric], entry) for entry in reversed(good) if metric in entry.metrics]
    finite = [(value, entry) for value, entry in valued if math.isfinite(value)]
    if not finite:
        return
    value, entry = (min if mode == "min" else max)(finite, key=lambda pair: pair[0])
    reasons[entry.generation].append(f"the best by {metric} ({mode} {value:g})")


def _add_recent(good: Sequence[Candidate], within_s: float, reasons: dict[str, list[str]]) -> None:
    """Keep those whose age is not shown to be greater.

    A clock may have been wrong at any save. "Now" is the earlier of the newest two recorded times, so that one save
    with a time far ahead ages nothing. A time that lies behind that of an older checkpoint is wrong, or the older one's
    is: the greater of them counts. One that lies ahead of "now" tells no age, and its checkpoint stays.
    """
    now_s = min([entry.saved_s for entry in good if entry.saved_s is not None][:2], default=math.inf)
    latest_s = -math.inf
    recent = f"saved within {duration_text(within_s)} before the newest ones"
    for position, entry in reversed(list(enumerate(good))):
        if entry.saved_s is None:
            reasons[entry.generation].append("its age is not known: when it was saved cannot be read")
        elif entry.saved_s > now_s:
            wrong = "its age is not known: it says that it was saved after the newest ones"
            reasons[entry.generation].append(recent if position < 2 else wrong)
        else:
            latest_s = max(latest_s, entry.saved_s)
            if now_s - latest_s <= within_s:
                reasons[entry.generation].append(recent)


def _add_doubtful(candidates: Sequence[Candidate], policy: Keep, reasons: dict[str, list[str]]) -> None:
    """Keep what the rules would keep if the doubtful ones were good, beside what they keep without them."""
    doubtful = [entry.generation for entry in candidates if entry.standing == "doubtful"]
    found = _kept_by_rules(_usable(candidates), policy) if doubtful else {}
    for generation in doubtful:
        if found[generation]:
            reasons[generation] += [*found[generation], "marked by a start off the lineage; it counts for nothing"]


def _add_others(
    candidates: Sequence[Candidate], good: Sequence[Candidate], policy: Keep, reasons: dict[str, list[str]]
) -> None:
    newest_step = good[0].step if good else -1
    for entry in candidates:
        if entry.standing == "unknown":
            reasons[entry.generation].append("the outcome of its save is not known; it counts for nothing")
        if entry.standing == "superseded" and entry.step >= newest_step:
            reasons[entry.generation].append("superseded, but the live branch has no newer step")
        newer = len({other.step for other in good if other.step > entry.step})
        if entry.standing == "damaged" and newer < max(policy.last, 2):
            reasons[entry.generation].append("damaged; it counts for nothing, and stays until newer ones are good")


def _add_second_copy(good: Sequence[Candidate], reasons: dict[str, list[str]]) -> None:
    kept = [entry.objects for entry in good if reasons[entry.generation]]
    if has_two_copies(kept):
        return
    for entry in good:
        if not reasons[entry.generation] and has_two_copies([*kept, entry.objects]):
            reasons[entry.generation].append("two that share nothing stay")
            return
    for found in reasons.values():
        if not found:
            found.append("no two good ones that share nothing exist")


def _decision(entry: Candidate, good: Sequence[Candidate], reasons: list[str]) -> Decision:
    if reasons:
        return Decision(entry.generation, entry.step, True, tuple(reasons))
    why = {
        "good": "no rule keeps it",
        "doubtful": "no rule keeps it",
        "damaged": "damaged, and enough newer ones are good",
        "superseded": f"superseded, and the live branch has reached step {good[0].step if good else 0}",
        "unknown": "",
    }[entry.standing]
    return Decision(entry.generation, entry.step, False, (why,))
