"""Conditions that ranks do not share stand in the manifest beside rank 0's, once for all ranks that have the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from safepoint.cli.entry import main
from safepoint.errors import CorruptionError
from safepoint.format.encoding import seal
from safepoint.format.manifest import Conditions, Manifest, ProgressRecord, RankConditions, decode_manifest
from safepoint.format.plain import encode_plain
from safepoint.restoring.own_conditions import compared_with
from safepoint.saving.background import SaveHandle
from safepoint.saving.capture import Snapshot, capture
from safepoint.storage.base import Storage
from safepoint.storage.local import LocalStorage
from safepoint.storage.memory import MemoryStorage
from tests.crash.job import CONDITIONS
from tests.saving.ranks.job import Rank, Ranks, manifests, replicated

WORLD = 4


def optimizer(rate: float) -> dict[str, Any]:
    return {"kind": "optimizer", "settings": {"groups": [{"lr": encode_plain(rate)}]}}


def of_rank(rank: int) -> Conditions:
    """Rank 0 is a stage without data; ranks 1 and 2 are another stage with data; rank 3 is rank 0 on another device."""
    if rank in (1, 2):
        return msgspec.structs.replace(
            CONDITIONS,
            environment={"threads": "4"},
            structure={"late": "bb"},
            configuration={"late": optimizer(0.2)},
            datasets={"data": encode_plain({"length": 10})},
            global_batch=8,
        )
    environment = {"threads": "4", "gpu": "A" if rank == 0 else "B"}
    return msgspec.structs.replace(
        CONDITIONS,
        environment=environment,
        structure={"early": "aa"},
        configuration={"early": optimizer(0.1)},
        datasets={},
        global_batch=None,
    )


def saved(storage: Storage) -> Manifest:
    job = Ranks(WORLD, storage=storage)

    def act(rank: Rank) -> None:
        number = rank.thread.rank
        items = capture(replicated(number, WORLD, 5))  # type: ignore[arg-type]
        made = Snapshot(ProgressRecord(5, 5, 5, 0, 0, 0), items, of_rank(number), {}, None, "exact")
        rank.saver.save(rank.membership.require(), lambda: made, SaveHandle(is_explicit=True))

    for outcome in job.run(act):
        outcome.returned()
    (manifest,) = manifests(storage)
    return manifest


def test_each_rank_finds_its_own_conditions_again_and_equal_ones_stand_there_once() -> None:
    """Spec: F7.8"""
    conditions = saved(MemoryStorage()).conditions
    assert conditions.ranks == (
        RankConditions(
            (1, 2),
            {"gpu": None},
            {"early": None, "late": "bb"},
            {"early": None, "late": optimizer(0.2)},
            {"data": encode_plain({"length": 10})},
            8,
        ),
        RankConditions((3,), {"gpu": "B"}),
    )
    for rank in range(WORLD):
        own = msgspec.structs.replace(of_rank(rank), world_size=WORLD)
        found = compared_with(msgspec.structs.replace(conditions, world_size=WORLD), own, rank=rank)
        assert (found.environment, found.configuration) == (own.environment, own.configuration)
        assert (found.datasets, found.global_batch) == (own.datasets, own.global_batch)
        assert found.structure == own.structure


def test_on_another_number_of_ranks_the_nearest_of_all_is_compared() -> None:
    """Spec: F7.8"""
    conditions = msgspec.structs.replace(saved(MemoryStorage()).conditions, world_size=WORLD)

    def now(**fields: Any) -> Conditions:
        return compared_with(conditions, msgspec.structs.replace(of_rank(0), world_size=2, **fields), rank=1)

    assert now(environment={"threads": "4", "gpu": "B"}).environment == {"threads": "4", "gpu": "B"}
    assert now(environment={"threads": "4"}).environment == {"threads": "4"}
    assert now(environment={"threads": "4", "gpu": "C"}).environment == {"threads": "4", "gpu": "A or absent or B"}
    assert now(structure={"early": "bb"}).structure == {"early": "aa", "late": "bb"}
    assert now().configuration == {"early": optimizer(0.1), "late": optimizer(0.2)}
    assert (now(global_batch=16).global_batch, now(global_batch=8).global_batch) == (8, 8)


def test_ranks_that_are_alike_say_nothing_of_their_conditions() -> None:
    """Spec: F7.8"""
    job = Ranks(WORLD)
    for outcome in job.run(lambda rank: rank.save(10)):
        outcome.returned()
    (manifest,) = manifests(job.storage)
    assert manifest.conditions.ranks is msgspec.UNSET
    assert "ranks" not in msgspec.to_builtins(manifest.conditions)


@pytest.mark.parametrize("ranks", [[[]], [[0]], [[4]], [[1], [1]], [[1, 1]], [[2, 1]]])
def test_conditions_of_no_rank_or_of_one_twice_are_damage(ranks: list[list[int]]) -> None:
    """Spec: F7.8"""
    manifest = saved(MemoryStorage())
    listed = tuple(RankConditions(tuple(one), {"gpu": "C"}) for one in ranks)
    wrong = msgspec.structs.replace(manifest, conditions=msgspec.structs.replace(manifest.conditions, ranks=listed))
    with pytest.raises(CorruptionError, match="of no rank, or of one twice"):
        decode_manifest(seal(wrong), where="manifest.json", generation=manifest.generation)


def test_show_tells_what_other_ranks_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(LocalStorage(tmp_path / "run"))
    assert main(["show", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "Otherwise on rank 1, 2" in shown and "Otherwise on rank 3" in shown
    told = shown.partition("Otherwise on rank 1, 2")[2].partition("Otherwise on rank 3")[0].splitlines()
    assert ["late.settings.groups", "[{'lr':", "0.2}]"] in [line.split() for line in told]
    assert ["gpu", "absent"] in [line.split() for line in told]
