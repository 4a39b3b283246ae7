"""The settings of a manager and the numbers it is given, checked when they are: what is wrong is said there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from safepoint.contract import Contract
from safepoint.errors import RequestError, advise
from safepoint.format.plain import encode_plain
from safepoint.restoring.match import Choice
from safepoint.retention.policy import Keep
from safepoint.saving.context import Staging
from safepoint.saving.ring import SMALLEST_BYTES
from safepoint.schedule import Schedule
from safepoint.signals import Signals

# What is kept may refer to files of so many saves, and no older one goes before a full one stands beside it.
_FULL_EVERY = 16


def check_kinds(*, contract: object, save: object, keep: object, signals: object, on_exception: object) -> None:
    """Raise `RequestError` for a setting that is not what its function makes, or no word that there is."""
    kinds: tuple[tuple[str, object, type, str], ...] = (
        ("contract", contract, Contract, "safepoint.Contract(...)"),
        ("save", save, Schedule, "safepoint.every(...)"),
        ("keep", keep, Keep, "safepoint.keep(...)"),
        ("signals", signals, Signals, "safepoint.on_signals(...) or None"),
    )
    for name, value, kind, expected in kinds:
        if value is not None and not isinstance(value, kind):
            raise _wrong(name, expected, value)
    if on_exception not in (None, "save"):
        raise _wrong("on_exception", "'save' or None", on_exception)


def check_values(state: object, accumulation: object, **deadlines_s: object) -> None:
    """Raise `RequestError` for a value of the wrong type or out of range."""
    if not isinstance(state, Mapping):
        raise _wrong("state", "a dict of live objects by item name", state)
    if accumulation is not None and (type(accumulation) is not int or accumulation < 1):
        raise _wrong("accumulation", "an int of at least 1", accumulation)
    for name, value in deadlines_s.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise _wrong(name, "seconds, more than 0", value)


def check_switches(**switches: object) -> None:
    """Raise `RequestError` for a switch that is neither True nor False."""
    for name, value in switches.items():
        if type(value) is not bool:
            raise _wrong(name, "True or False", value)


def read_back_of(value: object) -> bool | Literal["full"]:
    """Return how a restore looks at what it has set, or raise `RequestError` for a way that there is none of."""
    if value is True or value is False:
        return value
    if value == "full":
        return "full"
    raise _wrong("read_back", 'True, False or "full"', value)


def config_of(config: object) -> Any:
    """Return the user's own settings in the form in which they are stored, or raise `RequestError` naming the value."""
    try:
        return encode_plain(config, path="config")
    except RequestError as exc:
        advise(
            exc, "Pass plain values: vars(args) of an argparse.Namespace, dataclasses.asdict(settings) of a dataclass."
        )
        raise


def full_every(incremental: object) -> int:
    """Return of how many saves one is full, or raise `RequestError` for a number that is none."""
    if incremental is True:
        return _FULL_EVERY
    if incremental is False:
        return 1
    if type(incremental) is not int or incremental < 1:
        raise _wrong("incremental", "True, False, or of how many saves one is full", incremental)
    return incremental


def as_numbers(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return an update's metrics as plain floats.

    Raises:
        RequestError: One is no number, nor a tensor of one element.
    """
    if metrics is not None and not isinstance(metrics, Mapping):
        raise RequestError(
            "metrics are numbers by name", where="metrics", found=f"{type(metrics).__name__} {metrics!r:.80}"
        )
    numbers = {}
    for name, value in (metrics or {}).items():
        try:
            # A tensor that still has its graph warns when it becomes a number.
            numbers[str(name)] = float(value.detach() if hasattr(value, "detach") else value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as exc:
            found = f"{type(value).__name__}: {exc}"
            raise RequestError("a metric is not a number", where=str(name), found=found) from exc
    return numbers


def staging_of(staging_memory: object, *, background: bool, copies_behind: bool) -> Staging | Literal[False]:
    """Return which memory saves beside the training use; False where none is made beside it.

    Raises:
        RequestError: A bound is none, or bounds what is not done.
    """
    if staging_memory is not None and (type(staging_memory) is not int or staging_memory < SMALLEST_BYTES):
        raise _wrong("staging_memory", f"bytes, at least {SMALLEST_BYTES}, or None", staging_memory)
    if staging_memory is not None and not background:
        raise RequestError(
            "a setting bounds the copy of a background save, and no save is made in the background",
            where="staging_memory",
            expected="background=True beside it",
            remedy="Without background=True a save copies nothing: leave staging_memory= out.",
        )
    return background and Staging(staging_memory, copies_behind)


def compared_every(agreement: object, on_disagreement: object) -> int:
    """Return at every which save replicas are compared; 0 for never.

    Raises:
        RequestError: A setting is none that there is.
    """
    if on_disagreement not in ("refuse", "warn"):
        raise _wrong("on_disagreement", "'refuse' or 'warn'", on_disagreement)
    if agreement == "every":
        return 1
    if agreement == "off":
        return 0
    if type(agreement) is not int or agreement < 1:
        raise _wrong("agreement", "'every', 'off', or every how many saves", agreement)
    return agreement


def choose(*, skip: Iterable[str], items: Iterable[str] | None, late: Iterable[str]) -> Choice:
    """Return the choice that the options of a restore make.

    Raises:
        RequestError: An option is a single text, which would be taken for its letters.
    """
    only = None if items is None else _names("items", items)
    return Choice(_names("skip", skip), only, _names("late", late))


def _names(option: str, names: Iterable[str]) -> frozenset[str]:
    example = names if isinstance(names, str) else "model"
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise _wrong(option, f"a collection of item names, such as {{{example!r}}}", names)
    listed = list(names)
    if not all(isinstance(name, str) for name in listed):
        raise _wrong(option, f"a collection of item names, such as {{{example!r}}}", listed)
    return frozenset(listed)


def _wrong(name: str, expected: str, found: object) -> RequestError:
    text = f"{type(found).__name__} {found!r:.80}"
    return RequestError("a setting of the manager is wrong", where=name, expected=expected, found=text)
