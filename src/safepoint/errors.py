"""The exceptions of safepoint, grouped by what a handler does about them.

::

    SafepointError
    ├── RequestError (ValueError)     the call is wrong              → fix the program
    ├── NotFoundError (LookupError)   nothing committed matches      → start afresh, or choose another
    ├── MismatchError                 sound, but not for this job    → lists every difference
    │   └── ContractError             the promise cannot be kept     → permit the change, or choose another
    ├── CorruptionError               bytes contradict the record    → fall back to an older checkpoint
    ├── FormatVersionError            written by a newer format      → upgrade
    ├── StorageError                  the environment failed         → repair the store; .retryable
    │   ├── ObjectExistsError         the name is taken              → read what is there
    │   └── ObjectMissingError        no object has this name        → treat as absent
    ├── AbortedError                  a rank said no or was absent   → nothing was published; train on
    │   └── LeaderLostError           the leader's word did not come → whoever voted yes: the outcome is unknown
    ├── TornSnapshotError             state changed during the copy  → nothing was published
    ├── FencedError                   a newer incarnation owns it    → stop this process
    ├── OutcomeUnknownError           a publish may have landed      → look before trying again
    └── InternalError                 our bug                        → report it

Every error carries its facts as attributes (`where`, `expected`, `found`, `remedy`, `differences`), a stable `code`
and the exit code of the command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# What a message repeats of a text that a file or another rank names; the attributes hold all of it.
_LONGEST_SIDE = 1_000
_LONGEST_FACT = 10_000


@dataclass(frozen=True, slots=True)
class Difference:
    """Name one way in which what was saved and what is here now differ.

    `word` is what `Contract(permit=...)` must contain to allow it, such as ``model.added`` or ``optimizer.lr``.
    `subject` says on what: an item, a parameter, a setting.
    """

    word: str
    subject: str
    saved: str
    current: str

    def __str__(self) -> str:
        saved, current = (_shortened(side, _LONGEST_SIDE) for side in (self.saved, self.current))
        sides = f": saved {saved}, now {current}" if saved or current else ""
        return f"{self.subject}{sides} (permit word {self.word!r})"


class SafepointError(Exception):
    """Report that safepoint could not do what was asked; see the subclasses for what to do.

    Args:
        message: What was attempted and what went wrong, one sentence without a final full stop.
        where: The object concerned: a file, a tensor, a URL, an argument.
        expected: What should have been there.
        found: What was there.
        remedy: What to do next, a sentence.
        differences: All differences found, for errors that compare two sides.
    """

    code = "error"
    exit_code = 70

    def __init__(
        self,
        message: str,
        *,
        where: str = "",
        expected: object = None,
        found: object = None,
        remedy: str = "",
        differences: Sequence[Difference] = (),
    ) -> None:
        self.message = message
        self.where = where
        self.expected = expected
        self.found = found
        self.remedy = remedy
        self.differences = tuple(differences)
        super().__init__(self._render())

    def _render(self) -> str:
        text = self.message
        if self.where:
            text += f" [{self.where}]"
        if self.expected is not None:
            text += f"; expected {_shortened(self.expected, _LONGEST_FACT)}"
        if self.found is not None:
            text += f"; found {_shortened(self.found, _LONGEST_FACT)}"
        text = text.removesuffix(".") + "."
        for difference in self.differences:
            text += f"\n  - {difference}"
        if self.remedy:
            text += ("\n" if self.differences else " ") + self.remedy
        return text


class RequestError(SafepointError, ValueError):
    """Report a call that is wrong whatever lies on disk."""

    code = "request"
    exit_code = 2


class NotFoundError(SafepointError, LookupError):
    """Report that no committed checkpoint matches what was asked for."""

    code = "not_found"
    exit_code = 3


class MismatchError(SafepointError):
    """Report a sound checkpoint that does not fit the live objects.

    Nothing was touched, unless the remedy says that the live objects may hold a mixture: a newer checkpoint had then
    turned out damaged while it was read.
    """

    code = "mismatch"
    exit_code = 4


class ContractError(MismatchError):
    """Report that a restore cannot keep the promise that the contract asks for; touched is what a mismatch touches."""

    code = "contract"


class CorruptionError(SafepointError):
    """Report bytes that contradict their record: damage, truncation, a foreign or hostile file."""

    code = "corruption"
    exit_code = 1


class FormatVersionError(SafepointError):
    """Report a run or checkpoint that a newer format wrote."""

    code = "format_version"
    exit_code = 9


class StorageError(SafepointError):
    """Report a failure of the environment below safepoint: disk full, permission, input/output error.

    `errno` is the operating system's number where there is one; `retryable` says whether the same call may succeed.
    """

    code = "storage"
    exit_code = 5

    def __init__(
        self,
        message: str,
        *,
        where: str = "",
        expected: object = None,
        found: object = None,
        remedy: str = "",
        errno: int | None = None,
        retryable: bool = False,
    ) -> None:
        self.errno = errno
        self.retryable = retryable
        super().__init__(message, where=where, expected=expected, found=found, remedy=remedy)


class ObjectExistsError(StorageError):
    """Report that an exclusive create met an object of the same name."""

    code = "exists"


class ObjectMissingError(StorageError):
    """Report that no object has the name asked for."""

    code = "missing"


class AbortedError(SafepointError):
    """Report a save that a rank refused or did not take part in; nothing was published."""

    code = "aborted"
    exit_code = 7


class LeaderLostError(AbortedError):
    """Report that the leader did not answer in time or cannot be reached; it may still publish what has a full vote.

    Before its vote a rank takes it for any other `AbortedError`. A rank that has voted yes has to raise
    `OutcomeUnknownError` from it.
    """

    code = "leader_lost"


class TornSnapshotError(SafepointError):
    """Report that state changed while it was being copied; nothing was published."""

    code = "torn"
    exit_code = 8


class FencedError(SafepointError):
    """Report that a newer incarnation, or another living job, owns the run."""

    code = "fenced"
    exit_code = 6


class OutcomeUnknownError(SafepointError):
    """Report a publish whose answer was lost: the checkpoint may or may not exist."""

    code = "outcome_unknown"
    exit_code = 7


class InternalError(SafepointError):
    """Report a broken promise of safepoint to itself."""

    code = "internal"
    exit_code = 70


def advise(error: SafepointError, remedy: str) -> None:
    """Replace an error's remedy, where a caller knows more than the place that raised it."""
    error.remedy = remedy
    error.args = (error._render(),)


def _shortened(fact: object, longest: int) -> str:
    text = str(fact)
    return text if len(text) <= longest else f"{text[:longest]}… ({len(text)} letters)"
