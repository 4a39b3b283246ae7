"""Settings that are wrong are refused where they are given."""

from __future__ import annotations

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
