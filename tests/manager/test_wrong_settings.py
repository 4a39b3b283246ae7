"""Settings that are wrong are refused where they are given."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import safepoint as sp
from safepoint.data import ResumableLoader


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("save", 5),
        ("keep", 3),
        ("contract", "exact"),
        ("accumulation", "2"),
        ("accumulation", 2.0),
        ("accumulation", True),
        ("accumulation", 0),
        ("deadline_s", "60"),
        ("deadline_s", 0),
        ("background", "no"),
        ("takeover", 1),
        ("agreement", 0),
        ("on_disagreement", "ignore"),
    ],
)
def test_a_wrong_setting_is_named_when_the_manager_is_made(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(sp.RequestError, match=name):
        sp.CheckpointManager(tmp_path / "run", {}, **{name: value})
    assert list(tmp_path.iterdir()) == []


def test_a_bound_of_copies_that_no_save_makes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sp.RequestError, match="background=True"):
        sp.CheckpointManager(tmp_path / "run", {}, staging_memory=64 << 20)
    sp.CheckpointManager(tmp_path / "run", {}, staging_memory=64 << 20, background=True).close()


def test_settings_that_are_no_plain_value_are_refused_with_the_way_to_make_them_one(tmp_path: Path) -> None:
    for config in (argparse.Namespace(a=1), {"nested": argparse.Namespace(a=1)}):
        with pytest.raises(sp.RequestError, match=r"vars\(args\)"):
            sp.CheckpointManager(tmp_path / "run", {}, config=config)
    sp.CheckpointManager(tmp_path / "run", {}, config=vars(argparse.Namespace(a=1))).close()


def test_a_refusal_names_the_permits_that_no_difference_has(tmp_path: Path) -> None:
    def made(contract: sp.Contract, learning_rate: float) -> sp.CheckpointManager:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=learning_rate)
        return sp.CheckpointManager(tmp_path, {"model": model, "opt": optimizer}, contract=contract)

    with made(sp.Contract(), 0.5) as manager:
        manager.restore()
        manager.after_update()
        manager.save()
    contract = sp.Contract(permit={"optimizer.learning_rate", "foo.lr", "opt.momentum"})
    with made(contract, 0.25) as manager, pytest.raises(sp.ContractError) as caught:
        manager.restore()
    assert caught.value.remedy.endswith("No difference has the permitted words 'foo.lr', 'optimizer.learning_rate'.")


def test_a_second_manager_of_one_process_is_told_that_the_first_is_to_be_closed(tmp_path: Path) -> None:
    first = sp.CheckpointManager(tmp_path, {})
    first.restore()
    second = sp.CheckpointManager(tmp_path, {})
    with pytest.raises(sp.FencedError, match="another manager of this same process") as caught:
        second.restore()
    assert "close()" in caught.value.remedy and "Stop it" not in caught.value.remedy
    first.close()
    second.restore()
    second.close()


def test_updates_after_the_last_save_are_kept_at_an_end_only_by_a_save(tmp_path: Path) -> None:
    for name, saves_last, steps in (("none", False, [5]), ("last", True, [7, 5])):
        with sp.CheckpointManager(tmp_path / name, {}, save=sp.every(updates=5)) as manager:
            manager.restore()
            for _ in range(7):
                manager.after_update()
            if saves_last:
                manager.save()
        assert [checkpoint.step for checkpoint in sp.open_run(tmp_path / name).checkpoints()] == steps


@pytest.mark.parametrize("path", ["file", "file/below"])
def test_a_run_that_is_a_plain_file_is_refused_by_every_way_in(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_bytes(b"kept")
    manager = sp.CheckpointManager(tmp_path / path, {})
    for enter in (manager.restore, manager.checkpoints, lambda: sp.open_run(tmp_path / path)):
        with pytest.raises(sp.RequestError, match="a run is a folder"):
            enter()


@pytest.mark.parametrize(
    "setting", [{"agreement": "never"}, {"on_disagreement": "ignore"}], ids=lambda one: next(iter(one))
)
def test_a_wrong_setting_is_found_before_other_ranks_are_met(
    tmp_path: Path, setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[object] = []
    monkeypatch.setattr("safepoint.manager.find_group", lambda **options: met.append(options))
    with pytest.raises(sp.RequestError, match=next(iter(setting))):
        sp.CheckpointManager(tmp_path / "run", {}, **setting)
    assert met == []


@pytest.mark.parametrize("state", [None, [torch.nn.Linear(1, 1)]])
def test_a_state_that_is_no_mapping_is_refused(tmp_path: Path, state: Any) -> None:
    with pytest.raises(sp.RequestError, match="state"):
        sp.CheckpointManager(tmp_path / "run", state)


@pytest.mark.parametrize("option", ["skip", "items", "late"])
def test_a_single_text_in_place_of_item_names_is_refused(tmp_path: Path, option: str) -> None:
    manager = sp.CheckpointManager(tmp_path / "run", {})
    with pytest.raises(sp.RequestError, match=option):
        manager.restore(**{option: "model"})  # type: ignore[arg-type]
    manager.close()


@pytest.mark.parametrize(
    ("option", "value"), [("fingerprint", 5), ("name", 5), ("drop_last", 1), ("shuffle", 1), ("shuffle", "no")]
)
def test_a_loader_refuses_what_no_restore_could_take(option: str, value: Any) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(4.0))
    with pytest.raises(sp.RequestError, match=option):
        ResumableLoader(data, 2, seed=0, **{option: value})


def test_a_save_from_another_thread_is_refused(tmp_path: Path) -> None:
    manager = sp.CheckpointManager(tmp_path / "run", {"counters": {"best": 0}})
    manager.restore()
    errors: list[BaseException] = []

    def save() -> None:
        try:
            manager.save()
        except sp.SafepointError as exc:
            errors.append(exc)

    thread = threading.Thread(target=save)
    thread.start()
    thread.join()
    assert [type(error) for error in errors] == [sp.RequestError]
    assert "another thread" in str(errors[0])
    assert manager.save().wait().step == 0
    manager.close()
