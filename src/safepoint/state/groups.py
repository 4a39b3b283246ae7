"""Parameter groups of an optimizer, matched by the names of their parameters, never by position.

Pure: works on names and options.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from safepoint.errors import Difference
from safepoint.state.stored import malformed

# Options that schedulers write into groups. They come and go with a scheduler, so that their presence alone is no
# difference between two optimizers.
SCHEDULED_OPTIONS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})


# Kinds of devices that torch knows; a stored one is a hint, never asked of torch unless it is among them.
DEVICE_KINDS = frozenset({"cpu", "cuda", "mps", "xpu", "hpu", "meta", "mtia", "privateuseone", "ipu", "xla", "vulkan"})


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """Hold one stored group: qualified names in order, the kind of device of each, and the plain options."""

    parameters: tuple[str, ...]
    devices: tuple[str, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Matching:
    """Say which stored group is which live one.

    `pairs` are (stored, live) indices; no live group stands twice. `created` are the stored groups that must be added
    to the live optimizer, in stored order: their parameters exist but the optimizer does not know them yet.
    """

    pairs: tuple[tuple[int, int], ...]
    created: tuple[int, ...]
    differences: tuple[Difference, ...]


def match_groups(
    item: str, saved: Sequence[SavedGroup], live: Sequence[Sequence[str]], known: frozenset[str]
) -> Matching:
    """Match stored groups with live ones.

    Args:
        item: The optimizer's name, for the words of differences.
        saved: The stored groups.
        live: The names in each live group.
        known: All names that a parameter of this process has.
    """
    stored = [name for group in saved for name in set(group.parameters)]
    if len(set(stored)) != len(stored):
        raise malformed(f"{item}.groups", "each parameter in one group", "one of them in two")
    place = {name: index for index, names in enumerate(live) for name in names}
    pairs: dict[int, int] = {}
    created: list[int] = []
    found: list[Difference] = []
    spare = [index for index, names in enumerate(live) if not names]
    for number, group in enumerate(saved):
        hosts = sorted({place[name] for name in group.parameters if name in place})
        absent = [name for name in group.parameters if name not in place]
        found += [Difference(f"{item}.removed", name, "optimised", "absent") for name in absent if name not in known]
        is_new = not hosts and (not group.parameters or any(name in known for name in absent))
        if not group.parameters and spare:
            pairs[spare.pop(0)] = number
        elif is_new:
            created.append(number)
        found += _regrouped(item, number, group, hosts, [name for name in absent if name in known], pairs)
        for host in hosts:
            pairs.setdefault(host, number)
            found += _repeated(item, host, group, live[host])
    before = {name for group in saved for name in group.parameters}
    fresh = [name for names in live for name in names if name not in before]
    found += [Difference(f"{item}.added", name, "absent", "optimised") for name in fresh]
    return Matching(tuple((number, host) for host, number in pairs.items()), tuple(created), tuple(found))


def compare_options(item: str, saved: Mapping[str, Any], live: Mapping[str, Any], subject: str) -> list[Difference]:
    """Return the options that only one side has."""
    gone = [key for key in saved if key not in live and key not in SCHEDULED_OPTIONS]
    come = [key for key in live if key not in saved and key not in SCHEDULED_OPTIONS]
    return [Difference(f"{item}.{key}", subject, f"{key}={saved[key]!r}", "no such option") for key in gone] + [
        Difference(f"{item}.{key}", subject, "no such option", f"{key}={live[key]!r}") for key in come
    ]


def check_numbers(item: str, saved: Mapping[str, Any], live: Mapping[str, Any]) -> None:
    """Check that what is a number here, or a row of numbers, is no text, mapping or the like in the checkpoint.

    Raises:
        CorruptionError: It is.
    """
    for key, value in live.items():
        if key not in saved or not _is_number(value):
            continue
        rows = [saved[key]]
        if isinstance(value, tuple):
            if type(saved[key]) not in (tuple, list) or len(saved[key]) != len(value):
                raise malformed(f"{item}: {key}", f"{len(value)} numbers", repr(saved[key])[:80])
            rows = list(saved[key])
        for one in rows:
            if type(one) in (str, bytes, dict, list, tuple, set, frozenset):
                raise malformed(f"{item}: {key}", "a number", repr(one)[:80])


def ordered(names: Sequence[str], by: Sequence[str]) -> list[str]:
    """Return names in the order in which `by` lists them; names that it does not list keep their order at the end."""
    rank = {name: index for index, name in enumerate(by)}
    return sorted(names, key=lambda name: rank.get(name, len(rank)))


def recorded_order(live: Sequence[Sequence[str]], recorded: Sequence[Sequence[str]]) -> list[int]:
    """Return the indices of live groups in the order of recorded ones; groups that were not recorded come last.

    A restored run lists its groups as the checkpoint did, so that what it saves next is equal whatever the order in
    which its code built them.
    """
    rank = {name: index for index, names in enumerate(recorded) for name in names}
    last = len(recorded)
    return sorted(range(len(live)), key=lambda index: min((rank.get(name, last) for name in live[index]), default=last))


def _repeated(item: str, host: int, group: SavedGroup, live: Sequence[str]) -> list[Difference]:
    """Return a difference for each parameter that stands in its group more or less often; torch allows it, warning."""
    before, now = Counter(group.parameters), Counter(live)
    subject = f"{item}.param_groups[{host}]"
    return [
        Difference(f"{item}.groups", subject, f"{name} {before[name]} times", f"{now[name]} times")
        for name in before
        if name in now and before[name] != now[name]
    ]


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(_is_number(one) for one in value)
    return type(value) in (int, float) or hasattr(value, "dtype")


def _regrouped(
    item: str, number: int, group: SavedGroup, hosts: Sequence[int], outside: Sequence[str], pairs: Mapping[int, int]
) -> list[Difference]:
    word, subject = f"{item}.groups", f"{item}.param_groups[{number}] ({', '.join(group.parameters[:4])})"
    if len(hosts) > 1:
        return [Difference(word, subject, "one group", f"parameters in {len(hosts)} groups")]
    if hosts and outside:
        return [Difference(word, subject, "one group", f"{', '.join(outside[:4])} not given to the optimizer")]
    if hosts and hosts[0] in pairs:
        return [Difference(word, subject, "a group of its own", f"in one group with saved group {pairs[hosts[0]]}")]
    return []
