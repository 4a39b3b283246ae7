"""Refuse a restore that keeps less than the contract asks for, and say with which contract it would be accepted.

The contract that is offered is the whole one to write: it permits what the refused one permits, and what it lacks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from safepoint.contract import PER_RANK, UNCHANGED, Contract, Permit, Promise, Reason, lowest, side_of_bare
from safepoint.errors import ContractError, Difference

_OF_RANKS = frozenset({"world_size", "topology"})


def check_contract(
    contract: Contract,
    promise: Promise,
    *,
    where: str,
    aftermath: str = UNCHANGED,
    exempt: Collection[Reason] = (),
    derivable: Collection[Reason] = (),
    saved_ranks: int | None = None,
) -> None:
    """Raise `ContractError` when a reason lowers the promise below the contract and is not permitted.

    Args:
        contract: What is asked for.
        promise: What can be kept, with all reasons.
        where: The checkpoint.
        aftermath: What the error says of the live objects.
        exempt: Reasons that need no permit here.
        derivable: Reasons that the rule ``rng="derive"`` does away with.
        saved_ranks: How many ranks saved.
    """
    refused = [reason for reason in promise.reasons if reason not in exempt and not contract.accepts(reason)]
    if not refused:
        return
    # What a read-back finds alone says nothing of permits that were needed before it.
    idle = contract.words - {reason.word for reason in promise.reasons} if aftermath == UNCHANGED else frozenset()
    owned = any(reason.word.endswith(PER_RANK) for reason in refused)
    raise ContractError(
        "the checkpoint holds what each rank had of its own, which no rank of this job can be given"
        if owned
        else "the continued run would not be the run that was saved",
        where=where,
        expected=contract.level,
        found=lowest(reason.level for reason in refused),
        differences=[Difference(reason.word, reason.subject, reason.saved, reason.current) for reason in refused],
        remedy=f"{aftermath} {_way_back(refused, derivable, saved_ranks)}ccept it with "
        f"{_acceptance(contract, refused, derivable)}."
        + (f" No difference has the permitted words {_listed(idle)}." if idle else ""),
    )


def _way_back(refused: Sequence[Reason], derivable: Collection[Reason], saved_ranks: int | None) -> str:
    """Return how the sentence begins: what would make the job the saved one again, where that can be done."""
    of_ranks = [
        reason
        for reason in refused
        if reason in derivable or reason.word in _OF_RANKS or reason.word.endswith(PER_RANK)
    ]
    # A reason without sides tells of the save or of an input, not of a change.
    is_changed = any(reason.saved or reason.current for reason in refused if reason not in of_ranks)
    ranks = f"{saved_ranks} {'rank' if saved_ranks == 1 else 'ranks'}"
    ways = [f"resume on {ranks}"] if of_ranks and saved_ranks is not None else []
    ways += ["undo the change"] if is_changed or (of_ranks and not ways) else []
    if not ways:
        return "A"
    way = " and ".join(ways)
    return f"{way[0].upper()}{way[1:]}, or a"


def _acceptance(contract: Contract, refused: Sequence[Reason], derivable: Collection[Reason]) -> str:
    """Return the contract to write, and where its rule for streams would do, the words that do without the rule."""
    bare = {reason.word for reason in refused}
    kept = {reason.word for reason in refused if reason not in derivable}
    if bare == kept:
        return _written(contract, kept, rng=contract.rng)
    instead = _listed(bare - kept)
    return (
        f"{_written(contract, kept, rng='derive')}, which begins new random streams; permit={{{instead}}} in place of "
        "rng='derive' leaves them as the program made them"
    )


def _written(contract: Contract, further: set[str], *, rng: str) -> str:
    """Return a contract as it is written in a program, with further words permitted."""
    permits = {entry.word: entry for entry in contract.permit if isinstance(entry, Permit)}
    words = {word: repr(word) for word in further} | {word: _as_written(entry) for word, entry in permits.items()}
    permit = f", permit={{{', '.join(words[word] for word in sorted(words))}}}" if words else ""
    rule = f", rng={rng!r}" if rng != "refuse" else ""
    return f"Contract(level={contract.level!r}{permit}{rule})"


def _as_written(entry: Permit) -> str:
    if entry.keep == side_of_bare(entry.word):
        return repr(entry.word)
    return f"permit({entry.word!r}, keep={entry.keep!r})"


def _listed(words: Iterable[str]) -> str:
    return ", ".join(sorted(map(repr, words)))
