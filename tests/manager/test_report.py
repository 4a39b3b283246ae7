"""What a restore tells: step, promise, what is replayed, what was refused and why, what was checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import safepoint as sp
from safepoint.storage.local import LocalStorage
from tests.build import flip
from tests.manager.jobs import build, die, picture, streams, train


def part(url: Path, step: int, suffix: str = ".safetensors") -> Path:
    (folder,) = (url / "generations").glob(f"step-{step:012d}-*")
    (file,) = (one for one in folder.iterdir() if one.name.endswith(suffix))
    return file


def damage(url: Path, step: int) -> Path:
    file = part(url, step)
    flip(LocalStorage(str(url)), str(file.relative_to(url)))
    return file


def test_a_run_that_died_three_updates_after_its_save_says_that_three_come_again(tmp_path: Path) -> None:
    job = build(tmp_path, save=sp.every(updates=10))
    train(job, 23)
    die(job)

    job = build(tmp_path, seed=1)
    report = job.manager.restore()

    assert (report.step, report.replayed, report.promise.level) == (20, 3, "exact")
    assert "restored step 20" in str(report) and "3 updates were done after this step" in str(report)
    assert report.checks[-1] == "5 of 5 items read back equal"
    assert "each chunk by digest" in str(report)
    assert report.durations_s is not None and set(report.durations_s) >= {"select", "validate", "read", "apply"}
    assert all(seconds >= 0 for seconds in report.durations_s.values())
    job.manager.close()

    # The second start died at once: what the first one had done is still known.
    job = build(tmp_path, seed=1)
    assert job.manager.restore().replayed == 3
    job.manager.close()


def test_a_flipped_bit_is_named_by_file_and_the_older_checkpoint_is_taken(tmp_path: Path) -> None:
    job = build(tmp_path, save=sp.every(updates=2))
    train(job, 8)
    at_eight = picture(job)
    train(job, 10)
    die(job)
    file = damage(tmp_path, 10)

    job = build(tmp_path, seed=1)
    report = job.manager.restore()

    assert (report.step, report.replayed) == (8, 2)
    assert picture(job) == at_eight
    (refusal,) = report.refused
    assert (refusal.generation, refusal.file) == (file.parent.name, file.name)
    assert "digest" in refusal.reason and "expected" in refusal.reason
    assert f"refused {file.parent.name}/{file.name}" in str(report)
    job.manager.close()


def test_all_checkpoints_damaged_is_an_error_and_never_a_fresh_start(tmp_path: Path) -> None:
    """Field report B150."""
    job = build(tmp_path, save=sp.every(updates=2))
    train(job, 4)
    die(job)
    for step in (2, 4):
        damage(tmp_path, step)

    job = build(tmp_path, seed=1)
    with pytest.raises(sp.CorruptionError, match="no checkpoint of the run can be used") as caught:
        job.manager.restore()
    assert str(caught.value).count(".safetensors") >= 2
    # The live objects were written to: the error says it, and this manager does not train on.
    assert "may hold a mixture" in str(caught.value) and "Nothing was changed" not in str(caught.value)
    with pytest.raises(sp.InternalError, match="mixture"):
        train(job, 1)
    job.manager.close()


def test_a_restore_over_a_mixture_leaves_nothing_out(tmp_path: Path) -> None:
    job = build(tmp_path, save=sp.every(updates=2))
    train(job, 2)
    at_two = picture(job)
    die(job)
    (file,) = tmp_path.glob("generations/step-*2-*/*.safetensors")
    whole = file.read_bytes()
    damage(tmp_path, 2)

    job = build(tmp_path, seed=1)
    with pytest.raises(sp.CorruptionError):
        job.manager.restore()
    file.write_bytes(whole)
    for left_out in ({"skip": ["model"]}, {"items": ["optimizer"]}):
        with pytest.raises(sp.RequestError, match="mixture; this restore leaves some as they are"):
            job.manager.restore(**left_out)
    assert job.manager.restore().step == 2
    assert picture(job) == at_two
    job.manager.close()


def test_a_run_whose_manifests_are_gone_is_not_begun_anew_by_training_without_a_restore(tmp_path: Path) -> None:
    job = build(tmp_path, save=sp.every(updates=2))
    train(job, 4)
    die(job)
    for step in (2, 4):
        part(tmp_path, step, "manifest.json").write_bytes(b"")

    job = build(tmp_path, seed=1)
    with pytest.raises(sp.CorruptionError):
        train(job, 1)
    job.manager.close()


def test_a_fresh_start_says_so(tmp_path: Path) -> None:
    job = build(tmp_path)
    report = job.manager.restore()
    assert (report.is_fresh, report.step, report.generation, report.replayed) == (True, 0, None, 0)
    assert str(report).startswith("fresh start")
    job.manager.close()


def test_a_missing_run_with_a_step_or_a_requirement_is_an_error_and_nothing_is_created(tmp_path: Path) -> None:
    """Field reports B150, B151, B154."""
    job = build(tmp_path / "rnus")
    for options in ({"step": 5}, {"required": True}):
        with pytest.raises(sp.NotFoundError):
            job.manager.restore(**options)
    assert not (tmp_path / "rnus").exists()
    job.manager.close()
    assert not (tmp_path / "rnus").exists()


def test_a_branch_names_what_it_leaves_behind(tmp_path: Path) -> None:
    job = build(tmp_path, save=sp.every(updates=2))
    train(job, 7)
    die(job)

    job = build(tmp_path, seed=1, save=sp.every(updates=2))
    report = job.manager.restore(step=2, branch=True)
    assert [name.split("-")[1] for name in report.superseded] == ["000000000006", "000000000004"]
    assert "superseded: step-" in str(report)
    train(job, 4)
    die(job)

    job = build(tmp_path, seed=2)
    assert job.manager.restore().step == 4
    assert [one.step for one in job.manager.checkpoints()] == [4, 2]
    job.manager.close()


def test_a_step_that_is_not_there_is_an_error_and_claims_nothing(tmp_path: Path) -> None:
    """Field reports B150, B151."""
    job = build(tmp_path, save=sp.every(updates=2))
    train(job, 4)
    die(job)
    before = sorted(tmp_path.rglob("*"))
    job = build(tmp_path, seed=1)
    with pytest.raises(sp.NotFoundError, match=r"step 3; found steps 2, 4\. Nothing was changed"):
        job.manager.restore(step=3)
    assert sorted(tmp_path.rglob("*")) == before
    job.manager.close()


def test_a_branch_without_a_step_is_refused_before_anything_is_claimed(tmp_path: Path) -> None:
    job = build(tmp_path, save=sp.every(updates=2))
    train(job, 4)
    die(job)
    before = sorted(tmp_path.rglob("*"))
    job = build(tmp_path, seed=1)
    with pytest.raises(sp.RequestError, match="no step is named"):
        job.manager.restore(branch=True)
    assert sorted(tmp_path.rglob("*")) == before
    job.manager.close()


def probed(url: Path, probe: Any, **options: Any) -> Any:
    return build(url, probe=probe, **options)


def fixed(job_model: nn.Module) -> float:
    job_model.eval()
    with torch.no_grad():
        value = float(job_model(torch.ones(2, 4)).sum())
    job_model.train()
    return value


def saved_with_probe(url: Path, value: Any) -> None:
    job = probed(url, lambda: value)
    train(job, 2)
    job.manager.save()
    die(job)


def test_a_probe_that_gives_the_same_numbers_is_one_of_the_checks(tmp_path: Path) -> None:
    holder: list[nn.Module] = []
    job = probed(tmp_path, lambda: {"sum": fixed(holder[0])})
    holder.append(job.model)
    train(job, 2)
    job.manager.save()
    die(job)

    holder.clear()
    job = probed(tmp_path, lambda: {"sum": fixed(holder[0])}, seed=4)
    holder.append(job.model)
    report = job.manager.restore()

    assert report.promise.level == "exact" and "the probe's numbers" in report.checks
    job.manager.close()


def test_a_probe_that_gives_other_numbers_stops_the_start(tmp_path: Path) -> None:
    saved_with_probe(tmp_path, {"sum": 1.0, "gone": 2.0})

    job = probed(tmp_path, lambda: {"sum": 1.5, "new": 3.0}, seed=4)
    with pytest.raises(sp.MismatchError, match="other numbers") as caught:
        job.manager.restore()

    assert [(one.word, one.saved, one.current) for one in caught.value.differences] == [
        ("probe", "1.0", "1.5"),
        ("probe", "2.0", "None"),
        ("probe", "None", "3.0"),
    ]
    with pytest.raises(sp.InternalError):
        train(job, 3)
    job.manager.close()


def test_a_probe_within_its_tolerance_is_equal_and_beyond_it_not(tmp_path: Path) -> None:
    saved_with_probe(tmp_path, 100.0)
    job = probed(tmp_path, sp.Probe(lambda: 100.5, tolerance=0.01), seed=4)
    assert job.manager.restore().promise.level == "exact"
    job.manager.close()
    job = probed(tmp_path, sp.Probe(lambda: 102.0, tolerance=0.01), seed=4)
    with pytest.raises(sp.MismatchError, match=r"within 0\.01"):
        job.manager.restore()
    job.manager.close()


def test_a_permitted_probe_is_told_and_lowers_the_promise(tmp_path: Path) -> None:
    saved_with_probe(tmp_path, 1.0)
    job = probed(tmp_path, lambda: 2.0, seed=4, contract=sp.Contract(permit={"probe"}))
    report = job.manager.restore()
    assert report.promise.level == "approximate"
    assert [(one.word, one.saved, one.current) for one in report.reasons] == [("probe", "1.0", "2.0")]
    job.manager.close()


def test_what_is_no_probe_is_a_wrong_call(tmp_path: Path) -> None:
    with pytest.raises(sp.RequestError, match="probe"):
        probed(tmp_path, 5)


class Rounding(nn.Linear):
    """Changes its weight when its extra state is set: a load that does not give what was saved."""

    def get_extra_state(self) -> str:
        return "kept"

    def set_extra_state(self, state: str) -> None:
        with torch.no_grad():
            self.weight.copy_(self.weight.half().float())


def test_reading_back_finds_a_module_that_changes_what_it_is_given(tmp_path: Path) -> None:
    """Without the check the run would go on from other weights, as the last lines show. Field report B65."""
    torch.manual_seed(0)
    model = Rounding(3, 3)
    manager = sp.CheckpointManager(tmp_path, {"model": model})
    manager.save()
    manager.close()

    manager = sp.CheckpointManager(tmp_path, {"model": Rounding(3, 3)})
    with pytest.raises(sp.InternalError, match=r"not what was saved.*model.*may hold a mixture"):
        manager.restore()
    with pytest.raises(sp.InternalError, match="mixture"):
        manager.after_update()
    manager.close()

    again = Rounding(3, 3)
    manager = sp.CheckpointManager(tmp_path, {"model": again}, read_back=False)
    report = manager.restore()
    assert not any("read back" in check for check in report.checks)
    assert not torch.equal(again.weight, model.weight)
    manager.close()


def test_a_parametrization_comes_back_by_its_own_parameters(tmp_path: Path) -> None:
    def start(seed: int) -> tuple[nn.Module, sp.CheckpointManager]:
        torch.manual_seed(seed)
        model = parametrizations.weight_norm(nn.Linear(3, 3))
        return model, sp.CheckpointManager(tmp_path, {"model": model})

    model, manager = start(0)
    manager.save()
    manager.close()
    again, manager = start(1)
    assert manager.restore().promise.level == "exact"
    assert torch.equal(again.weight, model.weight)
    manager.close()


def test_restoring_draws_no_random_number_and_puts_the_streams_last(tmp_path: Path) -> None:
    """Field report B179."""
    job = build(tmp_path)
    train(job, 2)
    job.manager.save()
    expected = streams()
    die(job)

    job = build(tmp_path, seed=9)
    job.manager.restore()
    assert streams() == expected
    job.manager.close()


def test_the_step_counts_of_optimizer_schedule_and_run_are_recorded_together(tmp_path: Path) -> None:
    """Field reports B110, B115, B119, B185, B187."""
    job = build(tmp_path)
    train(job, 7)
    job.manager.save()
    job.manager.close()
    manifest = sp.open_run(tmp_path).manifest()
    counts = manifest.conditions.counts
    assert (counts["optimizer"], counts["scheduler"], manifest.progress.step, manifest.step) == (7, 7, 7, 7)
    assert manifest.progress.samples == 22 + 4 and manifest.progress.epoch == 1


def test_a_run_goes_on_from_the_highest_step_wherever_its_folder_was_moved_to(tmp_path: Path) -> None:
    """Steps are numbers: 100 comes after 20 and 9. Field reports B42, B117."""
    job = build(tmp_path / "old", save=sp.every(updates=1), keep=sp.keep(last=3, best=("loss", "min")))
    for step in range(1, 101):
        job.manager.after_update(metrics={"loss": abs(step - 9) + 1.0})
    die(job)
    (tmp_path / "old").rename(tmp_path / "new")

    job = build(tmp_path / "new", seed=1, keep=sp.keep(last=3, best=("loss", "min")))
    assert job.manager.restore().step == 100
    job.manager.after_update(metrics={"loss": 50.0})
    job.manager.save()
    job.manager.close()
    assert {one.step for one in job.manager.checkpoints()} >= {101, 100, 9}
    assert not (tmp_path / "old").exists()


def test_a_tracker_is_continued_by_its_stored_id_without_a_second_line_for_a_step(tmp_path: Path) -> None:
    """The id is the user's own state; the report says from which step the lines come again.

    Field reports B157, B158, B159.
    """
    lines: dict[tuple[str, int], str] = {}

    def track(job: Any, tracker: dict[str, str], until: int) -> None:
        while job.manager.progress.step < until:
            (done,) = train(job, job.manager.progress.step + 1)
            lines[tracker["id"], job.manager.progress.step] = done[1]

    tracker = {"id": "one"}
    job = build(tmp_path, save=sp.every(updates=4), items={"tracker": tracker})
    track(job, tracker, 6)
    before = dict(lines)
    die(job)

    tracker = {"id": "two"}
    job = build(tmp_path, seed=4, items={"tracker": tracker})
    report = job.manager.restore()
    assert (tracker["id"], report.step, report.replayed) == ("one", 4, 2)
    track(job, tracker, 8)
    assert {key: lines[key] for key in before} == before
    assert sorted(lines) == [("one", step) for step in range(1, 9)]
    job.manager.close()
