"""A run that begins with another run's checkpoint: it goes on as that one would have, and from then on is its own."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import safepoint as sp
from safepoint.catalog import read_lineage
from safepoint.errors import CorruptionError
from safepoint.format.records import LineageLink, ResumedRecord, check_resumed
from safepoint.retention.survey import resumed_lately
from safepoint.storage.local import LocalStorage
from tests.build import flip
from tests.manager.jobs import build, die, picture, train


def trained(url: Path, *steps: int) -> None:
    job = build(url)
    for step in steps:
        train(job, step)
        job.manager.save()
    job.manager.close()


def files(url: Path) -> dict[str, bytes]:
    return {str(path.relative_to(url)): path.read_bytes() for path in url.rglob("*") if path.is_file()}


def start(url: Path, source: object, *, seed: int = 1, **options: Any) -> tuple[Any, sp.RestoreReport]:
    job = build(url, seed=seed)
    return job, job.manager.restore(source=source, **options)


def generations(url: Path, step: int) -> list[Path]:
    return sorted((url / "generations").glob(f"step-{step:012d}-*"))


def test_a_run_goes_on_from_another_runs_checkpoint_bit_for_bit_and_only_reads_it(tmp_path: Path) -> None:
    """Spec: C10.7"""
    other, own = tmp_path / "other", tmp_path / "own"
    whole = build(tmp_path / "whole")
    expected = train(whole, 9)[4:]
    trained(other, 2, 4)
    before = files(other)

    job, report = start(own, other)

    assert (report.step, report.source, report.promise.level, report.is_fresh) == (4, str(other), "exact", False)
    assert report.generation == generations(other, 4)[0].name
    assert f"restored step 4 ({report.generation}) of {other}" in str(report)
    assert report.checks[-1] == "5 of 5 items read back equal"
    assert train(job, 9) == expected
    assert picture(job) == picture(whole)
    job.manager.save()
    die(job)
    die(whole)
    assert files(other) == before


def test_the_same_command_line_goes_on_from_the_runs_own_checkpoint_also_without_the_source(tmp_path: Path) -> None:
    """Spec: C10.7"""
    other, own = tmp_path / "other", tmp_path / "own"
    trained(other, 4)
    job, _ = start(own, f"{other}@4")
    train(job, 6)
    job.manager.save()
    train(job, 7)
    at_seven = picture(job)
    die(job)
    shutil.rmtree(other)

    job, report = start(own, f"{other}@4", seed=2)

    assert (report.step, report.source, report.replayed, report.promise.level) == (6, "", 1, "exact")
    assert any("was not used" in note and f"{other}@4" in note for note in report.notes)
    train(job, 7)
    assert picture(job) == at_seven
    job.manager.close()


def test_what_is_left_out_of_the_source_is_taken_from_the_runs_own_checkpoint(tmp_path: Path) -> None:
    """Else the same command would begin its data anew at each start."""
    other, own = tmp_path / "other", tmp_path / "own"
    trained(other, 4)
    job, report = start(own, other, skip={"data"})
    assert report.left_fresh == ("data",) and job.loader.position == 0
    train(job, 6)
    expected = job.loader.position
    job.manager.save()
    die(job)

    job, report = start(own, other, seed=2, skip={"data"})

    assert (report.step, report.left_fresh, job.loader.position) == (6, (), expected)
    job.manager.close()


def test_the_start_is_recorded_as_one_from_another_run(tmp_path: Path) -> None:
    """Spec: C10.7, C9.1"""
    other, own = tmp_path / "other", tmp_path / "own"
    trained(other, 4)
    job, report = start(own, other)
    train(job, 5)
    job.manager.save()
    die(job)
    job, _ = start(own, other)
    train(job, 6)
    job.manager.save()
    die(job)

    lineage = read_lineage(LocalStorage(own))
    records = [entry.resumed for entry in lineage.incarnations]
    assert [(one.source, one.step) for one in records if one is not None] == [(str(other), 4), ("", 5)]
    name = generations(own, 5)[0].name
    told = [(link.incarnation, link.resumed, link.step) for link in lineage.chain]
    assert told == [(1, report.generation, 4), (2, name, 5)]
    assert sp.open_run(own).manifest().lineage == lineage.chain
    assert not lineage.damage
    # The other run's generation is none that this run could keep.
    assert list(resumed_lately(lineage)) == [name]


def test_updates_of_a_start_that_never_saved_are_counted_when_they_are_done_again(tmp_path: Path) -> None:
    other, own = tmp_path / "other", tmp_path / "own"
    trained(other, 4, 8)
    job, _ = start(own, f"{other}@4")
    train(job, 7)
    die(job)
    job, report = start(own, f"{other}@4")
    assert report.replayed == 3
    die(job)
    # From another checkpoint nothing that was done is done again, and after a fresh start neither.
    job, report = start(own, f"{other}@8")
    assert report.replayed == 0
    die(job)
    fresh = build(tmp_path / "fresh")
    fresh.manager.restore()
    train(fresh, 7)
    die(fresh)
    job, report = start(tmp_path / "fresh", f"{other}@4")
    assert report.replayed == 0
    die(job)


def test_a_source_that_is_not_there_is_an_error_and_nothing_is_created(tmp_path: Path) -> None:
    """Spec: C10.7, C1.7"""
    other, own = tmp_path / "other", tmp_path / "own"
    trained(other, 4)
    job = build(own)
    for source in (tmp_path / "misspelt", f"{other}@5"):
        with pytest.raises(sp.NotFoundError):
            job.manager.restore(source=source)
    assert not own.exists() and not (tmp_path / "misspelt").exists()
    job.manager.close()


def test_damage_of_the_source_is_named_and_its_older_checkpoint_taken(tmp_path: Path) -> None:
    other, own = tmp_path / "other", tmp_path / "own"
    trained(other, 2, 4)
    (folder,) = generations(other, 4)
    flip(LocalStorage(other), f"generations/{folder.name}/rank-00000-of-00001.safetensors")
    job, report = start(own, other)
    assert (report.step, [one.generation for one in report.refused]) == (2, [folder.name])
    job.manager.close()


def test_damage_of_the_own_checkpoints_is_no_reason_to_begin_with_the_source_again(tmp_path: Path) -> None:
    """Spec: C10.7, C10.3"""
    other, own = tmp_path / "other", tmp_path / "own"
    trained(other, 4)
    job, _ = start(own, other)
    train(job, 6)
    job.manager.save()
    die(job)
    (folder,) = generations(own, 6)
    for damage in (lambda: (folder / "manifest.json").write_bytes(b""), lambda: shutil.rmtree(folder)):
        damage()
        job = build(own, seed=2)
        with pytest.raises(sp.CorruptionError, match="no checkpoint of the run can be used"):
            job.manager.restore(source=other)
        job.manager.close()


def test_a_restart_begins_with_the_source_although_there_are_checkpoints(tmp_path: Path) -> None:
    other, own = tmp_path / "other", tmp_path / "own"
    trained(other, 4)
    trained(own, 2, 6)
    job = build(own, seed=1, restart=True)
    report = job.manager.restore(source=other)
    assert (report.step, report.source) == (4, str(other))
    train(job, 5)
    job.manager.save()
    die(job)
    job, report = start(own, other)
    assert report.step == 5
    assert [one.step for one in job.manager.checkpoints()] == [5]
    job.manager.close()


def test_the_contract_is_asked_of_a_source_as_of_any_checkpoint(tmp_path: Path) -> None:
    other, own = tmp_path / "other", tmp_path / "own"
    trained(other, 4)
    job = build(own, seed=1, config={"lr": 1})
    before = picture(job)
    with pytest.raises(sp.ContractError):
        job.manager.restore(source=other)
    assert picture(job) == before
    job.manager.close()
    wide = build(own, seed=1, model=nn.Linear(4, 2))
    with pytest.raises(sp.MismatchError):
        wide.manager.restore(source=other)
    wide.manager.close()
    job = build(own, seed=1, config={"lr": 1}, contract=sp.Contract(permit={"config"}))
    assert job.manager.restore(source=other).step == 4
    job.manager.close()


def test_a_late_item_gets_its_state_from_the_source(tmp_path: Path) -> None:
    other, own = tmp_path / "other", tmp_path / "own"
    job = build(other, items={"extra": {"value": torch.arange(3.0)}})
    job.manager.save()
    job.manager.close()
    job = build(own, seed=1)
    job.manager.restore(source=other, late={"extra"})
    extra = {"value": torch.zeros(3)}
    job.manager.register("extra", extra)
    assert torch.equal(extra["value"], torch.arange(3.0))
    job.manager.close()


def test_retention_keeps_to_the_own_run(tmp_path: Path) -> None:
    other, own = tmp_path / "other", tmp_path / "own"
    trained(other, 2, 4)
    before = files(other)
    job = build(own, save=sp.every(updates=1), keep=sp.keep(last=2))
    job.manager.restore(source=f"{other}@2")
    train(job, 8)
    assert [one.step for one in job.manager.checkpoints()] == [8, 7]
    die(job)
    job = build(own, seed=3)
    assert job.manager.restore(source=f"{other}@2").step == 8
    job.manager.close()
    assert files(other) == before


@pytest.mark.parametrize("options", [{"step": 4}, {"step": 4, "branch": True}], ids=str)
def test_a_step_of_the_own_run_and_a_source_contradict_each_other(tmp_path: Path, options: dict[str, Any]) -> None:
    trained(tmp_path / "other", 4)
    job = build(tmp_path / "own")
    with pytest.raises(sp.RequestError, match="RUN@STEP"):
        job.manager.restore(source=tmp_path / "other", **options)
    job.manager.close()


def test_the_run_itself_is_no_source(tmp_path: Path) -> None:
    trained(tmp_path / "own", 4)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    job = build(tmp_path / "own")
    for source in (tmp_path / "own", f"{tmp_path / 'link'}@4", 5):
        with pytest.raises(sp.RequestError, match="source"):
            job.manager.restore(source=source)
    job.manager.close()


OTHER = "step-000000000004-i000007-00abcdef"
OWN = "step-000000000005-i000001-00abcdef"
AFRESH, FROM_OTHER = LineageLink(1, None, 0), LineageLink(1, OTHER, 4)


@pytest.mark.parametrize(
    ("chain", "source", "is_sound"),
    [
        ((AFRESH,), "", True),
        ((FROM_OTHER,), "runs/other", True),
        ((FROM_OTHER, LineageLink(2, OWN, 5)), "", True),
        ((FROM_OTHER,), "", False),
        ((AFRESH,), "runs/other", False),
        ((FROM_OTHER, LineageLink(2, OWN, 5)), "runs/other", False),
    ],
)
def test_a_record_names_a_source_where_its_chain_begins_with_another_run_and_only_there(
    chain: tuple[LineageLink, ...], source: str, is_sound: bool
) -> None:
    """Spec: C9.1"""
    own = chain[-1]
    record = ResumedRecord(1, "a1", own.incarnation, own.resumed, own.step, chain, (), False, "00", source)
    with contextlib.nullcontext() if is_sound else pytest.raises(CorruptionError, match="source contradicts"):
        check_resumed(record, where="x")
