"""Alike: what the ranks say of themselves beside their items, made one for the manifest.

1. What has to be equal on all ranks, and is not, is an error that names rank and word. A contract that accepts the
   difference at a restore accepts it here.
2. What lowers the promise on one rank lowers it for all.
3. Totals are sums over the ranks, unless the plans of their loaders told them already.

Spec: C2.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from safepoint.contract import LEFT, Level, Reason, plain_text
from safepoint.errors import AbortedError, Difference, MismatchError
from safepoint.format.digest import digest_bytes
from safepoint.format.manifest import Conditions
from safepoint.progress import Consumed, totals_of
from safepoint.saving.capture import Snapshot
from safepoint.saving.own_conditions import OwnConditions, digest_of, own_of, with_those_of_ranks

# Settings that need no other digest for people to see the difference.
_LONGEST_TEXT = 60
_MOST_LISTED = 8
_LEVELS: dict[str, Level] = {"config": "approximate", "dataset": "approximate", "global_batch": "approximate"}
# Words that speak of no item; an item's name is never empty.
_OF_ALL = ""


class Said(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hold a rank's counters and conditions, as far as they may differ from another rank's.

    `settings` maps each item, or nothing, to its words, and these to what the rank set. `own` is None where it is what
    the leader has.
    """

    consumed: Consumed | None
    accumulation: int | None
    epoch_end_due: bool
    settings: dict[str, dict[str, str]]
    structure: dict[str, str]
    counts: dict[str, int]
    reasons: dict[str, str]
    own: OwnConditions | None = None


def said_by(snapshot: Snapshot, *, leaders: str) -> Said:
    """Return what a rank says of itself; `leaders` is the digest of the leader's own conditions."""
    conditions = snapshot.conditions
    own = own_of(conditions)
    return Said(
        consumed=snapshot.consumed,
        accumulation=conditions.accumulation,
        epoch_end_due=snapshot.progress.epoch_end_due,
        settings=_settings(conditions),
        structure=conditions.structure,
        counts=conditions.counts,
        reasons=conditions.reasons,
        own=None if digest_of(own) == leaders else own,
    )


def check_alike(said: Sequence[Said], trees: Sequence[Mapping[str, str]], *, accepts: Callable[[Reason], bool]) -> None:
    """Compare what must be equal on all ranks.

    Ranks whose modules differ hold other stages or experts, and optimizers and schedules of their own.

    Args:
        said: What the ranks say, in their order.
        trees: The digest of each item's plain tree, by rank; structures are compared where all that have it are equal.
        accepts: Whether the contract accepts a difference.

    Raises:
        MismatchError: Names each rank and word.
    """
    found_trees: dict[str, set[str]] = {}
    for name, tree in (entry for one in trees for entry in one.items()):
        found_trees.setdefault(name, set()).add(tree)
    common = {name for name, digests in found_trees.items() if len(digests) == 1}
    structures = {name: text for one in reversed(said) for name, text in one.structure.items()}
    is_one = all(structures[name] == text for one in said for name, text in one.structure.items())
    found: list[tuple[int, Difference]] = []
    first: dict[tuple[str, str], str] = {}
    for rank, one in enumerate(said):
        told = [(item, word, text) for item, words in one.settings.items() for word, text in words.items()]
        told = [entry for entry in told if is_one or entry[0] == _OF_ALL]
        told += [(name, f"{name}.structure", text) for name, text in one.structure.items() if name in common]
        for item, word, text in told:
            expected = first.setdefault((item, word), text)
            reason = Reason(word, _LEVELS.get(word, "same_data"), word, expected, text)
            if text != expected and not accepts(reason):
                found.append((rank, Difference(word, f"{word} on rank {rank}", expected, text)))
    if found:
        ranks = list(dict.fromkeys(f"rank {rank}" for rank, _ in found))
        raise MismatchError(
            "the ranks were not set up alike",
            where=", ".join(ranks[:_MOST_LISTED]) + (" and more" if len(ranks) > _MOST_LISTED else ""),
            differences=[one for _, one in found[:_MOST_LISTED]],
            remedy="Set all ranks up alike, or permit the words in Contract(permit=...).",
        )


def check_types(types: dict[int, str], *, item: str) -> str:
    """Return the type that an item has on all ranks that hold it, or raise `AbortedError`."""
    (first, name), *others = sorted(types.items())
    for rank, other in others:
        if other != name:
            raise AbortedError(
                "ranks hold different kinds of object under one name",
                where=item,
                expected=f"{name}, as on rank {first}",
                found=f"{other} on rank {rank}",
            )
    return name


def check_steps(steps: Sequence[int]) -> None:
    """Raise `AbortedError` unless all ranks, in their order, are at the step of the first."""
    by_step: dict[int, list[int]] = {}
    for rank, step in enumerate(steps):
        by_step.setdefault(step, []).append(rank)
    others = {step: ranks for step, ranks in by_step.items() if step != steps[0]}
    if others:
        raise AbortedError(
            "the ranks are not at one boundary",
            where=", ".join(f"rank {rank}" for ranks in others.values() for rank in ranks),
            expected=f"step {steps[0]}, as on rank 0",
            found=", ".join(f"step {step}" for step in others),
            remedy="Call after_update() and save() on all ranks alike.",
        )


def find_totals(said: Sequence[Said]) -> tuple[int, int] | None:
    """Return samples and tokens over all ranks; None where a rank does not tell."""
    consumed = [one.consumed for one in said]
    told = [one for one in consumed if one is not None]
    return totals_of(told) if len(told) == len(consumed) else None


def settled(
    snapshot: Snapshot, totals: tuple[int, int] | None, said: Sequence[Said], types: Mapping[str, str]
) -> Snapshot:
    """Return a snapshot with the totals of all ranks and, where it is known what they said, with one set of conditions.

    Args:
        snapshot: This rank's own.
        totals: Samples and tokens over all ranks.
        said: What the ranks say, in their order; known to the leader alone.
        types: The types of all items.
    """
    if totals is not None:
        samples, tokens = totals
        progress = msgspec.structs.replace(snapshot.progress, samples=samples, tokens=tokens)
        snapshot = replace(snapshot, progress=progress)
    if not said:
        return snapshot
    counts, uneven = _counts(said, types)
    reasons = _joined([{**one.reasons, **uneven} for one in said])
    if len({one.epoch_end_due for one in said}) > 1 and "epoch_end" not in reasons:
        reasons["epoch_end"] = "saved when only some ranks had come to the end of their epoch"
    merged = msgspec.structs.replace(
        snapshot.conditions,
        accumulation=max((one.accumulation for one in said if one.accumulation is not None), default=None),
        counts=counts,
        reasons=reasons,
    )
    return replace(snapshot, conditions=with_those_of_ranks(merged, [one.own for one in said]))


def _counts(said: Sequence[Said], types: Mapping[str, str]) -> tuple[dict[str, int], dict[str, str]]:
    """Return the counts of all ranks, and a reason for each schedule that is not everywhere at one count.

    What items count is stated where all ranks agree, for a restore compares it. Of other counts the highest holds.
    """
    values: dict[str, dict[int, int]] = {}
    for rank, one in enumerate(said):
        for name, count in one.counts.items():
            values.setdefault(name, {})[rank] = count
    counts, uneven = {}, {}
    for name, by_rank in values.items():
        if len(set(by_rank.values())) == 1 or name not in types:
            counts[name] = max(by_rank.values())
        elif types[name] == "scheduler":
            listed = ", ".join(f"{count} on rank {rank}" for rank, count in list(by_rank.items())[:_MOST_LISTED])
            uneven[f"{name}.count"] = f"the ranks have made other numbers of steps of {name!r}: {listed}"
    return counts, uneven


def _joined(parts: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the reasons of all ranks by word; one that not every rank gives names the ranks that do."""
    holders: dict[str, dict[str, list[int]]] = {}
    for rank, reasons in enumerate(parts):
        for word, text in reasons.items():
            holders.setdefault(word, {}).setdefault(text, []).append(rank)
    joined = {}
    for word, texts in holders.items():
        told = [text if len(ranks) == len(parts) else f"{text} ({_listed(ranks)})" for text, ranks in texts.items()]
        joined[word] = "; ".join(told[:_MOST_LISTED])
    return joined


def _listed(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _MOST_LISTED} more" if len(ranks) > _MOST_LISTED else ""
    return f"rank {', '.join(map(str, ranks[:_MOST_LISTED]))}{more}"


def _settings(conditions: Conditions) -> dict[str, dict[str, str]]:
    general = {"config": _shown([("", conditions.config)])}
    if conditions.global_batch is not None:
        general["global_batch"] = str(conditions.global_batch)
    settings: dict[str, dict[str, str]] = {_OF_ALL: general}
    for name, one in conditions.configuration.items():
        by_word: dict[str, list[tuple[str, Any]]] = {}
        for place, leaf in _leaves(one):
            setting = place.split(".")[-1].split("[")[0]
            word = "scheduler" if one.get("kind") == "scheduler" else f"{name}.{setting}"
            by_word.setdefault(word, []).append((place, leaf))
        settings[name] = {word: _shown(leaves) for word, leaves in by_word.items()}
    for name, identity in conditions.datasets.items():
        settings.setdefault(name, {})["dataset"] = _shown([("", identity)])
    return settings


def _shown(leaves: Sequence[tuple[str, Any]]) -> str:
    """Return settings as a text that is equal only where they are: for people if short, else a digest."""
    texts = list(dict.fromkeys(plain_text(leaf) for _, leaf in leaves))
    text = ", ".join(texts)
    if len(texts) == 1 and len(text) <= _LONGEST_TEXT:
        return text
    return f"digest {digest_bytes(msgspec.json.encode([list(leaf) for leaf in leaves]))}"


def _leaves(tree: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each place and leaf of a JSON tree; what is tagged (`$float`) is a leaf."""
    if isinstance(tree, dict) and not (len(tree) == 1 and next(iter(tree)).startswith("$")):
        for key, value in tree.items():
            yield from _leaves(value, f"{place}.{key}" if place else str(key))
    elif isinstance(tree, list):
        for number, value in enumerate(tree):
            yield from _leaves(value, f"{place}[{number}]")
    elif tree != LEFT:
        yield place, tree
