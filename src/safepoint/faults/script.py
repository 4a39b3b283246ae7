"""What shall go wrong, where and when, as data that can be printed and replayed."""

from __future__ import annotations

import enum
import errno
import fnmatch
from dataclasses import dataclass

from safepoint.faults.chance import Chance

VERBS = (
    "root_exists",
    "make_root",
    "make_folder",
    "sync_folder",
    "create",
    "write",
    "finish",
    "publish",
    "put",
    "append",
    "append_line",
    "replace_line",
    "read",
    "read_into",
    "size",
    "list",
    "delete",
    "delete_folder",
)
_BYTE_VERBS = frozenset({"write", "publish", "put", "append_line", "replace_line", "read", "read_into"})
_UNCUT_VERBS = frozenset({"root_exists", "create", "append"})


class SimulatedCrash(BaseException):
    """Stand for the death of the process: no `except Exception` catches it, as none outlives a real one."""


class Effect(enum.Enum):
    """What happens to an operation instead of what was asked.

    ``FAIL``: an error number of the system. A `write` stores a part first, as on a full disk; other verbs do nothing.
    ``CUT_SHORT``: less is done than reported. Bytes, sizes and listings lack their end; a sync, a deletion or a new
    folder is reported and not done.
    ``FLIP_BIT``: one bit of the bytes on their way is turned over.
    ``LOSE_ANSWER``: the operation is done, and an error is reported: `OutcomeUnknownError` by `publish`.
    ``STOP``: the process dies within the operation. A `write` may have stored a part, a `publish` or `put` may leave a
    temporary object. Every later operation raises `SimulatedCrash` too, so that no clean-up outlives the process.
    """

    FAIL = "fail"
    CUT_SHORT = "cut short"
    FLIP_BIT = "flip a bit"
    LOSE_ANSWER = "lose the answer"
    STOP = "stop"

    def __repr__(self) -> str:
        return f"Effect.{self.name}"


@dataclass(frozen=True, slots=True)
class Fault:
    """Say what goes wrong, and with which operation.

    An operation is one call of a verb; those of writers and appenders count by themselves (see `VERBS`). The fault
    meets operations that agree with `operation`, `verb` and `path` and can suffer the effect: a sync has no bit.

    Args:
        effect: What happens.
        operation: The operation's number, counted from 0; with `lasts` that one and the later ones. None: any.
        verb: A glob over verbs, such as ``publish`` or ``*_folder``.
        path: A glob over paths; ``*`` also matches ``/``.
        occurrence: How many operations that agree are spared first.
        errno: The error number of `Effect.FAIL`.
        lasts: Whether the fault stays from then on, instead of happening once.
    """

    effect: Effect
    operation: int | None = None
    verb: str = "*"
    path: str = "*"
    occurrence: int = 0
    errno: int = errno.EIO
    lasts: bool = False

    def meets(self, number: int, verb: str, path: str) -> bool:
        """Return whether an operation agrees with this fault, whatever came before it."""
        if self.effect is Effect.FLIP_BIT and verb not in _BYTE_VERBS:
            return False
        if self.effect is Effect.CUT_SHORT and verb in _UNCUT_VERBS:
            return False
        if self.operation is not None and not (number == self.operation or (self.lasts and number > self.operation)):
            return False
        return fnmatch.fnmatchcase(verb, self.verb) and fnmatch.fnmatchcase(path, self.path)

    def __str__(self) -> str:
        place = f"operation {self.operation}" if self.operation is not None else f"match {self.occurrence}"
        what = f"fail with {errno.errorcode.get(self.errno, self.errno)}" if self.effect is Effect.FAIL else ""
        length = " from then on" if self.lasts else ""
        return f"{what or self.effect.value} at {place} of {self.verb!r} on {self.path!r}{length}"


@dataclass(frozen=True, slots=True)
class FaultScript:
    """List faults; the first that meets an operation happens to it.

    `seed` decides what the faults leave open: where bytes are cut, which bit is flipped. The `repr` is Python that
    makes the same script again.
    """

    faults: tuple[Fault, ...] = ()
    seed: int = 0

    def __str__(self) -> str:
        return f"seed {self.seed}: " + ("; ".join(str(fault) for fault in self.faults) or "no fault")


def random_script(seed: int, *, operation_count: int) -> FaultScript:
    """Return a script of one or two faults among the first `operation_count` operations; same seed, same script."""
    chance = Chance("script", seed)
    numbers = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.ESTALE)
    effects = tuple(Effect)
    faults = tuple(
        Fault(
            effects[chance.below(len(effects))],
            operation=chance.below(operation_count),
            errno=numbers[chance.below(len(numbers))],
            lasts=chance.below(4) == 0,
        )
        for _ in range(1 + chance.below(2))
    )
    return FaultScript(faults, seed)
