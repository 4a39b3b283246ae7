"""Each condition that may differ between a save and a restore, through the manager: refused, permitted, told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import safepoint as sp
from safepoint.data import Cursor, ResumableLoader, may_repeat, may_skip
from tests.manager.jobs import Net, Points, bits, build, die, refused, train

CUT = 4


@pytest.fixture
def url(tmp_path: Path) -> Path:
    """A run cut inside its first epoch."""
    job = build(tmp_path, config={"clip": 1.0, "layers": [2, 2]})
    train(job, CUT)
    job.manager.save()
    die(job)
    return tmp_path


def start(url: Path, **options: Any) -> Any:
    return build(url, seed=3, **{"config": {"clip": 1.0, "layers": [2, 2]}, **options})


def accepted(url: Path, make: Callable[..., Any], permit: set[str]) -> sp.RestoreReport:
    job = make(url, contract=sp.Contract(permit=permit))
    with job.manager:
        return job.manager.restore()


def test_an_unchanged_start_keeps_the_exact_promise_without_reasons(url: Path) -> None:
    job = start(url)
    report = job.manager.restore()
    assert (report.promise.level, report.reasons) == ("exact", ())
    job.manager.close()


def with_loader(url: Path, make: Callable[[], ResumableLoader], **options: Any) -> Any:
    job = start(url, **options)
    job.manager.close()
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    items = {"model": model, "optimizer": optimizer, "scheduler": schedule, "data": make()}
    options.setdefault("config", {"clip": 1.0, "layers": [2, 2]})
    job.manager = sp.CheckpointManager(url, items, **options)
    job.model, job.optimizer, job.scheduler = model, optimizer, schedule
    return job


def loader(length: int = 22, batch: int = 4, **options: Any) -> Callable[[], ResumableLoader]:
    return lambda: ResumableLoader(Points(length), batch, seed=options.pop("seed", 5), **options)


CHANGES: dict[str, tuple[Callable[..., Any], str, str, str, str]] = {
    "config": (
        lambda url, **options: start(url, config={"clip": 2.0, "layers": [2, 2]}, **options),
        "config",
        "approximate",
        "1.0",
        "2.0",
    ),
    "length of the data": (
        lambda url, **options: with_loader(url, loader(23), **options),
        "dataset",
        "approximate",
        "22",
        "23",
    ),
    "name of the data": (
        lambda url, **options: with_loader(url, loader(name="other"), **options),
        "dataset",
        "approximate",
        "Points",
        "other",
    ),
    "fingerprint of the data": (
        lambda url, **options: with_loader(url, loader(fingerprint="abc"), **options),
        "dataset",
        "approximate",
        "None",
        "abc",
    ),
    "batch size": (
        lambda url, **options: with_loader(url, loader(batch=2), **options),
        "global_batch",
        "approximate",
        "4",
        "2",
    ),
    "dropout": (
        lambda url, **options: start(url, model=Net(dropout=0.5), **options),
        "model.structure",
        "same_data",
        "",
        "",
    ),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_a_change_is_refused_with_both_values_and_accepted_by_its_word(url: Path, change: str) -> None:
    """Field reports B23, B118, B153."""
    make, word, level, saved, current = CHANGES[change]

    error = refused(make(url))
    report = accepted(url, make, {word})

    assert {one.word for one in error.differences} == {word}
    assert any(saved in one.saved and current in one.current for one in error.differences)
    assert word in str(error) and "Nothing was changed" in str(error)
    assert report.promise.level == level
    assert {one.word for one in report.reasons} == {word}
    assert any(saved in one.saved and current in one.current for one in report.reasons)


def test_an_approximate_contract_accepts_another_data_set_and_says_so(url: Path) -> None:
    job = with_loader(url, loader(23), contract=sp.Contract(level="approximate"))
    report = job.manager.restore()
    assert report.promise.level == "approximate"
    assert {one.word for one in report.reasons} == {"dataset"}
    job.manager.close()


def test_another_seed_of_the_order_does_not_fit_until_it_is_permitted(url: Path) -> None:
    with pytest.raises(sp.MismatchError) as caught:
        with_loader(url, loader(seed=6)).manager.restore()
    assert {one.word for one in caught.value.differences} == {"dataset.order"}

    contract = sp.Contract(level="approximate", permit={"dataset.order"})
    job = with_loader(url, loader(seed=6), contract=contract)
    assert job.manager.restore().promise.level == "approximate"
    job.manager.close()


def test_another_number_of_workers_is_told_by_nobody_because_it_changes_nothing(url: Path) -> None:
    job = with_loader(url, loader(num_workers=2))
    assert job.manager.restore().promise.level == "exact"
    job.manager.close()


ENVIRONMENT = {
    "torch": ("versions", "same_data"),
    "python": ("versions", "same_data"),
    "safepoint": ("versions", "exact"),
    "device": ("device", "same_data"),
    "threads": ("device", "same_data"),
    "deterministic_algorithms": ("determinism", "same_data"),
    "float32_matmul_precision": ("determinism", "same_data"),
}


@pytest.mark.parametrize("key", list(ENVIRONMENT))
def test_each_part_of_the_environment_is_compared(url: Path, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import safepoint.conditions as conditions

    word, level = ENVIRONMENT[key]
    real = conditions.describe()
    monkeypatch.setattr(conditions, "__version__", "99" if key == "safepoint" else sp.__version__)
    changed = {**real, **({} if key == "safepoint" else {key: "99"})}
    monkeypatch.setattr(conditions, "describe", lambda *_, **__: changed)

    if level != "exact":
        assert {one.word for one in refused(start(url)).differences} == {word}
    report = accepted(url, start, {word})
    assert report.promise.level == level
    assert [(one.word, one.current) for one in report.reasons] == [(word, "99")]


def test_a_declared_accumulation_is_compared_at_the_restore(tmp_path: Path) -> None:
    job = build(tmp_path, accumulation=4)
    train(job, 2, accumulation=4)
    job.manager.save()
    die(job)

    error = refused(build(tmp_path, seed=2, accumulation=3))
    assert [(one.word, one.saved, one.current) for one in error.differences] == [("accumulation", "4", "3")]


@pytest.mark.parametrize("now", [1, 3, 5])
def test_an_observed_accumulation_is_compared_at_the_first_boundary(tmp_path: Path, now: int) -> None:
    """Field report B221."""
    job = build(tmp_path)
    train(job, 2, accumulation=4)
    job.manager.save()
    die(job)

    job = build(tmp_path, seed=2)
    job.manager.restore()
    with pytest.raises(sp.ContractError) as caught:
        train(job, 3, accumulation=now)
    assert [(one.word, one.saved, one.current) for one in caught.value.differences] == [("accumulation", "4", str(now))]
    die(job)

    job = build(tmp_path, seed=2, contract=sp.Contract(permit={"accumulation"}))
    job.manager.restore()
    train(job, 4, accumulation=now)
    job.manager.close()


def test_an_epochs_last_window_may_be_short(tmp_path: Path) -> None:
    """Six batches in windows of four: the second window of each epoch has two."""

    def script(job: Any, until: int) -> None:
        while job.manager.progress.step < until:
            batches = list(job.loader)
            for window in (batches[:4], batches[4:]) if len(batches) > 2 else (batches,):
                for values, ids in window:
                    (job.model(values) - ids).square().mean().backward()
                    job.manager.after_microbatch()
                job.optimizer.step()
                job.manager.after_update(batches=len(window))
                if job.manager.progress.step == until:
                    return

    job = build(tmp_path)
    script(job, 1)
    job.manager.save()
    die(job)
    job = build(tmp_path, seed=2)
    job.manager.restore()
    script(job, 4)
    job.manager.close()


@pytest.mark.parametrize("replay", [may_repeat(3), may_skip(3)])
def test_the_replay_policy_of_a_cursor_lowers_the_promise(tmp_path: Path, replay: Any) -> None:
    def make(**options: Any) -> sp.CheckpointManager:
        return sp.CheckpointManager(tmp_path, {"input": Cursor(replay=replay, name="topic")}, **options)

    manager = make()
    manager.save()
    manager.close()
    manager = make()
    with pytest.raises(sp.ContractError, match="up to 3"):
        manager.restore()
    manager.close()
    manager = make(contract=sp.Contract(permit={"replay"}))
    assert manager.restore().promise.level == "approximate"
    manager.close()


def test_a_changed_replay_policy_or_source_is_named(tmp_path: Path) -> None:
    def make(cursor: Cursor, **options: Any) -> sp.CheckpointManager:
        return sp.CheckpointManager(tmp_path, {"input": cursor}, **options)

    manager = make(Cursor(name="topic"))
    manager.save()
    manager.close()
    with pytest.raises(sp.MismatchError) as caught:
        make(Cursor(name="topic", replay=may_skip(1)), contract=sp.Contract(permit={"replay"})).restore()
    assert [one.word for one in caught.value.differences] == ["dataset.replay"]
    with pytest.raises(sp.ContractError) as refusal:
        make(Cursor(name="queue")).restore()
    assert [one.word for one in refusal.value.differences] == ["dataset"]


def test_a_contract_with_an_unknown_word_or_level_is_a_wrong_call() -> None:
    with pytest.raises(sp.RequestError, match="unknown word"):
        sp.Contract(permit={"learning-rate"})
    with pytest.raises(sp.RequestError, match="unknown level"):
        sp.Contract(level="perfect")  # type: ignore[arg-type]


def test_a_restore_that_was_refused_leaves_the_next_start_everything(url: Path) -> None:
    refused(start(url, config={"clip": 9.0}))
    job = start(url)
    report = job.manager.restore()
    assert report.step == CUT and report.promise.level == "exact"
    assert bits(job.optimizer.state_dict()["state"]) != []
    job.manager.close()
