"""What ranks count and were set up with: one set of totals and conditions, and an error where they must be equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from safepoint.contract import Contract
from safepoint.errors import MismatchError, SafepointError
from safepoint.format.manifest import Conditions, Manifest, ProgressRecord
from safepoint.format.plain import encode_plain
from safepoint.progress import Consumed
from safepoint.saving.background import SaveHandle
from safepoint.saving.capture import Snapshot, capture
from tests.crash.job import CONDITIONS
from tests.saving.ranks.job import Rank, Ranks, manifests, replicated

WORLD = 3
SETTINGS: dict[str, Any] = {
    "adam": {"kind": "optimizer", "settings": {"groups": [{"lr": encode_plain(0.1), "eps": encode_plain(1e-8)}]}},
    "schedule": {"kind": "scheduler", "settings": {"T_max": 100}},
}
ALIKE = msgspec.structs.replace(CONDITIONS, structure={"model": "aa"}, configuration=SETTINGS, global_batch=12)

Making = Callable[[int], Snapshot]


def made(
    rank: int,
    *,
    conditions: Conditions = ALIKE,
    consumed: Consumed | None = None,
    contract: Contract | None = None,
    is_at_end: bool = False,
) -> Snapshot:
    """Return what a rank has at step 5."""
    progress = ProgressRecord(5, 5, 1000 + rank, 0, 0, 0, is_at_end)
    items = capture(replicated(rank, WORLD, 5))  # type: ignore[arg-type]
    accepts = (contract or Contract()).accepts
    return Snapshot(progress, items, conditions, {}, None, "exact", consumed, accepts)


def saved(making: Making) -> tuple[list[tuple[int, int] | SafepointError], list[Manifest]]:
    """Save on all ranks; return the totals that each was told, or its error, and what was committed."""
    job = Ranks(WORLD)

    def act(rank: Rank) -> tuple[int, int] | SafepointError:
        told: list[Snapshot] = []
        handle = SaveHandle(is_explicit=True)
        try:
            rank.saver.save(rank.membership.require(), lambda: making(rank.thread.rank), handle, on_agreed=told.append)
        except SafepointError as exc:
            return exc
        return told[0].progress.samples, told[0].progress.tokens

    return [outcome.returned() for outcome in job.run(act)], manifests(job.storage)  # type: ignore[misc]


def changed(rank: int, odd: int, **fields: Any) -> Conditions:
    return msgspec.structs.replace(ALIKE, **fields) if rank == odd else ALIKE


def test_samples_and_tokens_are_summed_over_all_ranks_and_all_ranks_are_told() -> None:
    """Spec: C2.3"""
    counts = [Consumed(100, 50, samples=10 + rank, tokens=7 * rank, is_planned=False) for rank in range(WORLD)]
    told, (manifest,) = saved(lambda rank: made(rank, consumed=counts[rank]))
    assert told == [(100 + 10 + 11 + 12, 50 + 0 + 7 + 14)] * WORLD
    assert (manifest.progress.samples, manifest.progress.tokens) == (133, 71)


def test_what_the_loaders_plan_tells_of_all_ranks_is_not_summed_again() -> None:
    """Two ranks of three share a part of the data, as ranks of a tensor-parallel group do."""
    counts = [Consumed(samples=6, planned=12), Consumed(samples=6, planned=12), Consumed(samples=6, planned=12)]
    told, _ = saved(lambda rank: made(rank, consumed=counts[rank]))
    assert told == [(12, 0)] * WORLD
    counts[1] = Consumed(samples=5, planned=12, is_planned=False)
    told, _ = saved(lambda rank: made(rank, consumed=counts[rank]))
    assert told == [(6 + 5 + 6, 0)] * WORLD


def test_a_reason_of_any_rank_stands_in_the_manifest_with_its_ranks() -> None:
    """Spec: C2.3"""
    late, ahead = {"schedule.late": "stepped late"}, {"data_ahead": "1 batch"}
    reasons = [{}, {**late, **ahead}, ahead]
    _, (manifest,) = saved(
        lambda rank: made(rank, conditions=msgspec.structs.replace(ALIKE, reasons=reasons[rank]), is_at_end=rank == 2)
    )
    assert manifest.conditions.reasons == {
        "schedule.late": "stepped late (rank 1)",
        "data_ahead": "1 batch (rank 1, 2)",
        "epoch_end": "saved when only some ranks had come to the end of their epoch",
    }
    _, (manifest,) = saved(lambda rank: made(rank, conditions=msgspec.structs.replace(ALIKE, reasons=late)))
    assert manifest.conditions.reasons == late


def test_counts_that_ranks_do_not_share_are_not_stated_and_an_uneven_schedule_is_a_reason() -> None:
    """Spec: C2.3"""
    counts = [{"schedule": 5, "model": 5, "batches_ahead": rank} for rank in range(WORLD)]
    counts[1] = {"schedule": 6, "model": 4, "batches_ahead": 1}
    _, (manifest,) = saved(lambda rank: made(rank, conditions=msgspec.structs.replace(ALIKE, counts=counts[rank])))
    assert manifest.conditions.counts == {"batches_ahead": 2}
    assert list(manifest.conditions.reasons) == ["schedule.count"]
    assert "5 on rank 0, 6 on rank 1, 5 on rank 2" in manifest.conditions.reasons["schedule.count"]


@pytest.mark.parametrize("odd", range(WORLD))
@pytest.mark.parametrize(
    ("word", "fields"),
    [
        ("config", {"config": encode_plain({"seed": 4})}),
        ("global_batch", {"global_batch": 16}),
        ("model.structure", {"structure": {"model": "bb"}}),
        (
            "adam.lr",
            {
                "configuration": {
                    **SETTINGS,
                    "adam": {"kind": "optimizer", "settings": {"groups": [{"lr": encode_plain(0.2), "eps": 0}]}},
                }
            },
        ),
        ("scheduler", {"configuration": {**SETTINGS, "schedule": {"kind": "scheduler", "settings": {"T_max": 9}}}}),
    ],
)
def test_ranks_that_were_set_up_otherwise_are_named_with_the_word(word: str, fields: dict[str, Any], odd: int) -> None:
    """Spec: C2.3"""
    errors, committed = saved(lambda rank: made(rank, conditions=changed(rank, odd, **fields)))
    assert committed == []
    # Of three ranks the first is what the others are compared with.
    named = "rank 1, rank 2" if odd == 0 else f"rank {odd}"
    for error in errors:
        assert isinstance(error, MismatchError) and error.where == named
        assert word in {one.word for one in error.differences}
    if word == "adam.lr":
        assert isinstance(errors[0], MismatchError)
        values = {(one.saved, one.current) for one in errors[0].differences if one.word == word}
        assert values == {("0.2", "0.1") if odd == 0 else ("0.1", "0.2")}


def test_a_difference_that_the_contract_accepts_at_a_restore_is_accepted_at_a_save() -> None:
    fields = {"config": encode_plain({"rank": 1})}
    for contract in (Contract("exact", {"config"}), Contract("approximate")):
        told, committed = saved(lambda rank, c=contract: made(rank, conditions=changed(rank, 1, **fields), contract=c))  # type: ignore[misc]
        assert len(committed) == 1 and not any(isinstance(one, SafepointError) for one in told)


def test_stages_of_a_pipeline_may_have_settings_of_their_own() -> None:
    """The trees differ, so the modules are other ones; the items here are of one tree, and a stage has another name."""
    other = {"adam": {"kind": "optimizer", "settings": {"groups": [{"lr": encode_plain(0.3)}]}}}
    conditions = [
        msgspec.structs.replace(ALIKE, structure={"stages": str(rank)}, configuration=other if rank else SETTINGS)
        for rank in range(WORLD)
    ]
    _, committed = saved(lambda rank: made(rank, conditions=conditions[rank]))
    assert len(committed) == 1
