"""Save training runs so that they can actually resume, and prove that they do.

Public names are imported when they are first used, so that reading a run never waits for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from safepoint.checkpoints import Checkpoint as Checkpoint
    from safepoint.contract import Contract as Contract
    from safepoint.contract import Promise as Promise
    from safepoint.contract import Reason as Reason
    from safepoint.contract import permit as permit
    from safepoint.errors import AbortedError as AbortedError
    from safepoint.errors import ContractError as ContractError
    from safepoint.errors import CorruptionError as CorruptionError
    from safepoint.errors import Difference as Difference
    from safepoint.errors import FencedError as FencedError
    from safepoint.errors import FormatVersionError as FormatVersionError
    from safepoint.errors import InternalError as InternalError
    from safepoint.errors import MismatchError as MismatchError
    from safepoint.errors import NotFoundError as NotFoundError
    from safepoint.errors import OutcomeUnknownError as OutcomeUnknownError
    from safepoint.errors import RequestError as RequestError
    from safepoint.errors import SafepointError as SafepointError
    from safepoint.errors import StorageError as StorageError
    from safepoint.errors import TornSnapshotError as TornSnapshotError
    from safepoint.manager import CheckpointManager as CheckpointManager
    from safepoint.progress import Progress as Progress
    from safepoint.restoring.outcome import RestoreReport as RestoreReport
    from safepoint.retention.pins import pin as pin
    from safepoint.retention.pins import unpin as unpin
    from safepoint.retention.policy import Keep as Keep
    from safepoint.retention.policy import keep as keep
    from safepoint.run import Run as Run
    from safepoint.run import open_run as open_run
    from safepoint.saving.background import SaveHandle as SaveHandle
    from safepoint.saving.context import SaveResult as SaveResult
    from safepoint.schedule import Schedule as Schedule
    from safepoint.schedule import every as every
    from safepoint.signals import Signals as Signals
    from safepoint.signals import on_signals as on_signals
    from safepoint.state.kinds import per_rank as per_rank
    from safepoint.state.kinds import replicated as replicated
    from safepoint.state.kinds import sharded as sharded
    from safepoint.state.probe import Probe as Probe
    from safepoint.stats import SaveCost as SaveCost
    from safepoint.stats import Stats as Stats
    from safepoint.stats import StepTimes as StepTimes

__version__ = "0.1.0"

# The home of each public name, by module. Type checkers read the imports above; a test keeps the two alike.
_HOMES = {
    "AbortedError": "safepoint.errors",
    "Checkpoint": "safepoint.checkpoints",
    "CheckpointManager": "safepoint.manager",
    "Contract": "safepoint.contract",
    "ContractError": "safepoint.errors",
    "CorruptionError": "safepoint.errors",
    "Difference": "safepoint.errors",
    "every": "safepoint.schedule",
    "FencedError": "safepoint.errors",
    "FormatVersionError": "safepoint.errors",
    "InternalError": "safepoint.errors",
    "Keep": "safepoint.retention.policy",
    "keep": "safepoint.retention.policy",
    "MismatchError": "safepoint.errors",
    "NotFoundError": "safepoint.errors",
    "on_signals": "safepoint.signals",
    "open_run": "safepoint.run",
    "OutcomeUnknownError": "safepoint.errors",
    "per_rank": "safepoint.state.kinds",
    "permit": "safepoint.contract",
    "pin": "safepoint.retention.pins",
    "Probe": "safepoint.state.probe",
    "Progress": "safepoint.progress",
    "Promise": "safepoint.contract",
    "Reason": "safepoint.contract",
    "replicated": "safepoint.state.kinds",
    "RequestError": "safepoint.errors",
    "RestoreReport": "safepoint.restoring.outcome",
    "Run": "safepoint.run",
    "SafepointError": "safepoint.errors",
    "SaveCost": "safepoint.stats",
    "SaveHandle": "safepoint.saving.background",
    "SaveResult": "safepoint.saving.context",
    "Schedule": "safepoint.schedule",
    "sharded": "safepoint.state.kinds",
    "Signals": "safepoint.signals",
    "Stats": "safepoint.stats",
    "StepTimes": "safepoint.stats",
    "StorageError": "safepoint.errors",
    "TornSnapshotError": "safepoint.errors",
    "unpin": "safepoint.retention.pins",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
