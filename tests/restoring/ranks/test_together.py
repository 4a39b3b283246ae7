"""All ranks restore the same checkpoint, or all raise the same error, whatever each of them sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from safepoint.contract import Contract
from safepoint.errors import Difference, NotFoundError
from safepoint.faults.group import MessageEffect, MessageFault, MessageScript, random_message_scripts
from safepoint.faults.script import SimulatedCrash
from safepoint.restoring.select import Wish
from safepoint.restoring.together import Ranks
from safepoint.state.item import SavedItem
from safepoint.storage.memory import MemoryStorage
from safepoint.testing.ranks import RankThread, RankThreads
from tests.restoring.ranks.jobs import (
    Cut,
    Part,
    View,
    by_columns,
    by_rows,
    holds,
    part_of,
    replicated,
    run_of,
    same,
    start,
)

COUNTS = [(4, 2), (2, 3), (3, 1), (1, 4), (4, 4), (2, 5)]


@pytest.mark.parametrize(("saved", "now"), COUNTS)
@pytest.mark.parametrize("cut", [by_rows, by_columns, replicated])
@pytest.mark.parametrize("saved_cut", [by_rows, replicated])
def test_any_number_of_ranks_restores_what_any_number_saved(saved: int, now: int, cut: Cut, saved_cut: Cut) -> None:
    storage = run_of(1, 2, world_size=saved, cut=saved_cut)
    started = start([storage] * now, [{"model": part_of(rank, now, cut)} for rank in range(now)])
    reports = started.reports()
    assert all(holds(one, 2) for one in started.parts)
    assert same([report.promise for report in reports]) and same([report.checks for report in reports])
    assert [reason.word for reason in reports[0].promise.reasons] == ([] if saved == now else ["world_size"])


def test_the_leader_alone_looks_for_checkpoints_and_reads_their_records() -> None:
    """Spec: C10.6"""
    views = [View(run_of(1, 2, world_size=4)) for _ in range(1)]
    views += [View(views[0].storage) for _ in range(2)]
    start(views, [{"model": part_of(rank, 3)} for rank in range(3)]).reports()
    for view in views[1:]:
        assert "list" not in {verb for verb, _ in view.log}
        assert {path[-14:] for verb, path in view.log if verb == "read"} <= {"-of-00004.json"}


def test_each_rank_opens_only_the_files_that_it_needs() -> None:
    storage = run_of(1, world_size=4)
    views = [View(storage) for _ in range(4)]
    start(views, [{"model": part_of(rank, 4)} for rank in range(4)]).reports()
    for rank, view in enumerate(views):
        opened = {path.rsplit("/", 1)[1] for verb, path in view.log if verb == "read_into"}
        assert opened <= {f"rank-{rank:05d}-of-00004.safetensors"}


def test_no_checkpoint_is_a_fresh_start_on_every_rank_and_an_error_on_every_rank_where_one_is_required() -> None:
    """Spec: C10.4, C10.6"""
    storage = run_of(world_size=1)
    items = [{"model": part_of(rank, 3)} for rank in range(3)]
    assert all(report.saved is None for report in start([storage] * 3, items).reports())
    errors = start([storage] * 3, items, wish=Wish(required=True)).errors()
    assert same(errors) and errors[0].startswith("NotFoundError")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_does_not_see_the_newest_data_file_takes_all_to_the_older_checkpoint(rank: int) -> None:
    """Spec: C10.2, C10.6"""
    storage = run_of(1, 2, world_size=3)
    views = [View(storage), View(storage), View(storage)]
    views[rank].hidden = "generations/step-000000000002-*/*.safetensors"
    started = start(views, [{"model": part_of(number, 3)} for number in range(3)])
    assert all(holds(one, 1) for one in started.parts)
    (refusal,) = started.reports()[0].refused.values()
    assert same([report.refused for report in started.reports()])
    assert refusal.file.endswith(".safetensors")
    # What the leader does not see it has not chosen, so there is no need to name it.
    assert rank == 0 or f"[rank {rank}: " in refusal.reason


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_looks_elsewhere_is_named_by_every_rank(rank: int) -> None:
    """Spec: C10.3, C10.6"""
    storage, elsewhere = run_of(1, 2, world_size=3), MemoryStorage()
    elsewhere.make_root()
    views = [elsewhere if number == rank else storage for number in range(3)]
    started = start(views, [{"model": part_of(number, 3)} for number in range(3)])
    errors = started.errors()
    assert same(errors) and errors[0].startswith("CorruptionError")
    assert errors[0].count(f"[rank {rank}: ") == 2
    assert not any(one.is_touched for one in started.parts)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_reads_damaged_bytes_takes_all_to_the_older_checkpoint(rank: int) -> None:
    """Spec: C10.2, C11.2"""
    storage = run_of(1, 2, world_size=2)
    views = [View(storage), View(storage), View(storage)]
    views[rank].damaged = "generations/step-000000000002-*"
    started = start(views, [{"model": part_of(number, 3)} for number in range(3)])
    assert all(holds(one, 1) for one in started.parts)
    refused = [report.refused for report in started.reports()]
    assert same(refused) and f"[rank {rank}: " in str(refused[0])


def test_a_damaged_header_is_found_before_anything_is_touched_by_a_rank_that_needs_the_file() -> None:
    """Spec: C11.1"""
    storage = run_of(1, world_size=3)
    views = [View(storage), View(storage, damaged_header="generations/*/rank-00001-of-*"), View(storage)]
    started = start(views, [{"model": part_of(rank, 3)} for rank in range(3)])
    errors = started.errors()
    assert same(errors) and "header is damaged [rank 1: " in errors[0] and "mixture" not in errors[0]
    # Nobody else needs the file of rank 1.
    elsewhere = [View(storage, damaged_header="generations/*/rank-00001-of-*"), View(storage), View(storage)]
    assert start(elsewhere, [{"model": part_of(rank, 3)} for rank in range(3)]).reports()


def test_where_every_checkpoint_is_damaged_for_one_rank_all_say_that_live_objects_hold_a_mixture() -> None:
    """Spec: C10.3, C11.3"""
    storage = run_of(1, 2, world_size=2)
    views = [View(storage), View(storage, damaged="generations/*")]
    errors = start(views, [{"model": part_of(rank, 2)} for rank in range(2)]).errors()
    assert same(errors) and errors[0].startswith("CorruptionError")
    assert "may hold a mixture" in errors[0]


def test_what_does_not_fit_on_one_rank_is_told_by_every_rank_and_nothing_is_touched() -> None:
    """Spec: C11.1, C11.7"""
    storage = run_of(1, world_size=3)
    items = [{"model": part_of(rank, 3)} for rank in range(3)]
    wrong = Difference("model.shape", "model.w", "(11, 6)", "(11, 7)")
    everywhere = Difference("model.dtype", "model.b", "float32", "float64")
    for rank, named in enumerate(items):
        named["model"].differences = (everywhere, wrong) if rank == 1 else (everywhere,)
    started = start([storage] * 3, items)
    errors = started.errors()
    assert same(errors) and errors[0].startswith("MismatchError")
    assert "model.w (rank 1): saved (11, 6)" in errors[0] and "model.b: saved float32" in errors[0]
    assert not any(one.is_touched for one in started.parts)


def test_what_another_rank_holds_is_not_missing_where_the_number_of_ranks_has_changed() -> None:
    storage = run_of(1, world_size=3)

    def ranks(*lacking: int) -> list[dict[str, Part]]:
        items = [{"model": part_of(rank, 2)} for rank in range(2)]
        for rank in lacking:
            items[rank]["model"].differences = (Difference("model.removed", "model.w", "a parameter", "absent"),)
        return items

    assert start([storage] * 2, ranks(1)).reports()
    errors = start([storage] * 2, ranks(0, 1)).errors()
    assert same(errors) and "model.removed" in errors[0]


def test_a_rank_that_cannot_apply_stops_all_and_no_older_checkpoint_is_passed_off() -> None:
    """Spec: C11.3, C11.7"""
    storage = run_of(1, world_size=2)
    items = [{"model": part_of(rank, 2, fails_to_apply=rank == 1)} for rank in range(2)]
    errors = start([storage] * 2, items).errors()
    assert same(errors) and "rank 1: model" in errors[0] and "may hold a mixture" in errors[0]


def test_a_rank_whose_object_did_not_take_its_state_stops_all() -> None:
    """Spec: C11.7, C11.8"""
    storage = run_of(1, world_size=2)
    items = [{"model": part_of(rank, 2, is_deaf=rank == 1)} for rank in range(2)]
    errors = start([storage] * 2, items).errors()
    assert same(errors) and errors[0].startswith("InternalError: a restored item is not what was saved [rank 1: model]")


def test_a_change_of_the_number_of_ranks_has_to_be_permitted_and_every_rank_says_so() -> None:
    storage = run_of(1, world_size=4)
    started = start([storage] * 2, [{"model": part_of(rank, 2)} for rank in range(2)], contract=Contract())
    errors = started.errors()
    assert same(errors) and errors[0].startswith("ContractError") and "'world_size'" in errors[0]
    assert not any(one.is_touched for one in started.parts)


@pytest.mark.parametrize("key", ["restore/1/1/*", "restore/1/4/*", "restore/1/7/*", "restore/1/8/*"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_leaves_no_other_one_that_believes_in_a_restore(rank: int, key: str) -> None:
    storage = run_of(1, 2, world_size=2)
    fault = MessageFault(MessageEffect.STOP, key=key)
    items = [{"model": part_of(number, 3)} for number in range(3)]
    started = start([storage] * 3, items, scripts={rank: MessageScript((fault,))})
    for outcome in started.outcomes:
        expected = "simulated" if outcome.rank == rank else "LeaderLostError" if rank == 0 else "AbortedError"
        found = "simulated" if isinstance(outcome.error, SimulatedCrash) else type(outcome.error).__name__
        assert found == expected
    assert rank == 0 or all("rank 1" in str(outcome.error) for outcome in started.outcomes if outcome.rank != rank)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_to_messages_no_two_ranks_go_on_from_different_checkpoints(seed: int) -> None:
    print(f"replay: python -m pytest '{__file__}' -k 'different_checkpoints[{seed}]'")
    storage = run_of(1, 2, world_size=2)
    scripts = random_message_scripts(seed, world_size=3, operation_count=24, longest_s=90.0)
    started = start([storage] * 3, [{"model": part_of(rank, 3)} for rank in range(3)], scripts=scripts)
    restored = [outcome.value for outcome in started.outcomes if outcome.value is not None]
    assert same([one.saved.manifest.generation for one in restored if one.saved is not None])
    for outcome, one in zip(started.outcomes, started.parts, strict=True):
        assert outcome.error is not None or holds(one, 2)


def test_what_the_leader_alone_looks_up_fails_on_every_rank() -> None:
    def look(rank: RankThread) -> str:
        def find() -> str:
            raise NotFoundError("there is no run here", where="elsewhere")

        ranks = Ranks(rank.group, deadline_s=10.0)
        assert ranks.by_leader(lambda: "found", "no use") == ("found" if rank.rank == 0 else "no use")
        return ranks.by_leader(find, "")

    outcomes = RankThreads(3).run(look)
    assert same([str(outcome.error) for outcome in outcomes])
    assert all(type(outcome.error) is NotFoundError for outcome in outcomes)


def test_a_live_object_is_brought_into_the_form_that_is_restored_into_before_it_is_compared() -> None:
    @dataclass(slots=True)
    class Folded(Part):
        is_folded: bool = True

        def prepare(self) -> None:
            self.is_folded = False

        def check(self, saved: SavedItem) -> Sequence[Difference]:
            return [Difference("model.shape", "w", "", "")] if self.is_folded else []

    held = part_of(0, 1).held
    start([run_of(1, world_size=2)], [{"model": Folded("model", held)}]).reports()


def test_the_board_keeps_no_record_of_a_restore_that_is_over() -> None:
    """Indexes may be large: what all ranks have heard is taken off, but for the last word."""
    storage = run_of(1, 2, world_size=3)
    started = start([storage] * 3, [{"model": part_of(rank, 3)} for rank in range(3)])
    started.reports()
    assert sum(len(message) for message in started.board.values()) < 1000


def read_for(rank: RankThread, seconds: float) -> None:
    """Take a step of a restore together, which lasts long on rank 1."""
    ranks = Ranks(rank.group, deadline_s=1800.0, silence_s=60.0)
    ranks.all(lambda: rank.ambient.sleep(seconds if rank.rank == 1 else 0.0))


def test_a_rank_that_reads_for_long_is_waited_for() -> None:
    for outcome in RankThreads(3).run(lambda rank: read_for(rank, 1700.0)):
        outcome.returned()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_frozen_while_it_restores_is_named_long_before_the_deadline(rank: int) -> None:
    """Spec: C11.12"""
    key = "restore/1/parts/closed" if rank == 0 else "restore/1/parts/1"
    faults = [
        MessageFault(MessageEffect.PAUSE, verb="post", key=key, seconds=900.0),
        MessageFault(MessageEffect.PAUSE, verb="post", key=f"alive/{rank}", seconds=900.0, occurrence=1),
    ]
    job, ended_s = RankThreads(3, scripts={rank: MessageScript(tuple(faults))}), {}

    def act(one: RankThread) -> None:
        try:
            read_for(one, 30.0)
        finally:
            ended_s[one.rank] = one.ambient.monotonic()

    began_s = job.world.seconds
    outcomes = job.run(act)
    others = [outcome for outcome in outcomes if outcome.rank != rank]
    assert all(f"rank {rank}" in str(outcome.error) and "60 s" in str(outcome.error) for outcome in others)
    assert all(ended_s[outcome.rank] - began_s <= 120.0 for outcome in others)
