"""Random streams: plain bytes under stated names, restored last, and never silently left where they were."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import safepoint as sp
from safepoint.data import ResumableLoader
from safepoint.format.stencil import encode_text
from safepoint.state.randomness import GlobalRandomItem, RandomStreams
from tests.manager.jobs import build, streams, train


def manager_of(url: Path, **items: object) -> sp.CheckpointManager:
    return sp.CheckpointManager(url, items)


def test_the_global_streams_are_captured_without_being_asked(tmp_path: Path) -> None:
    """Field report B182."""
    manager = manager_of(tmp_path, loop={"n": 1})
    manager.save()
    expected = [random.random(), float(np.random.rand()), torch.rand(3).tolist()]
    manager.close()
    for seed in (1, 2):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        manager = manager_of(tmp_path, loop={})
        manager.restore()
        assert [random.random(), float(np.random.rand()), torch.rand(3).tolist()] == expected
        manager.close()


class Drawing:
    """An object that draws from every global stream to tell its state."""

    def state_dict(self) -> dict[str, int]:
        random.random()
        np.random.rand()
        torch.rand(1)
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        return None


def test_streams_are_saved_and_left_as_they_were_before_any_item_told_its_state(tmp_path: Path) -> None:
    manager = manager_of(tmp_path, drawing=Drawing(), loop={"n": 1})
    before = RandomStreams.snapshot()
    manager.save()
    assert before.moved() == []
    stored = GlobalRandomItem(streams=before).capture()
    (index,) = tmp_path.glob("generations/*/rank-*.json")
    assert json.loads(index.read_bytes())["items"]["rng"]["plain"] == json.loads(stored.tree)
    manager.close()


def test_streams_are_stored_as_plain_text_that_any_reader_decodes(tmp_path: Path) -> None:
    """No tensor of them can be moved to a device by mistake. Field reports B171, B181, B202, B206."""
    manager = manager_of(tmp_path, generator=torch.Generator(), numbers=np.random.default_rng(1), own=random.Random(3))
    manager.save()
    manager.close()
    (index,) = tmp_path.glob("generations/*/rank-*.json")
    content = json.loads(index.read_bytes())
    assert set(content["items"]) == {"rng", "generator", "numbers", "own"}
    assert content["tensors"] == []


def test_a_stream_under_another_name_is_an_error(tmp_path: Path) -> None:
    """Field report B173."""
    manager = manager_of(tmp_path, noise=torch.Generator())
    manager.save()
    manager.close()
    manager = manager_of(tmp_path, noises=torch.Generator())
    with pytest.raises(sp.MismatchError) as caught:
        manager.restore()
    assert sorted(one.word for one in caught.value.differences) == ["noise.removed", "noises.added"]
    manager.close()


def test_streams_of_devices_that_are_gone_are_a_reason_with_both_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of a machine with two accelerators on one that has none. Field report B174."""
    manager = manager_of(tmp_path, loop={"n": 1})
    capture = GlobalRandomItem.capture

    def of_two_devices(item: GlobalRandomItem) -> object:
        captured = capture(item)
        plain: Any = captured.plain
        return dataclasses.replace(captured, tree=encode_text({**plain, "cuda": [b"1", b"2"]}))

    with monkeypatch.context() as patched:
        patched.setattr(GlobalRandomItem, "capture", of_two_devices)
        manager.save()
    manager.close()

    manager = manager_of(tmp_path, loop={})
    before = streams()
    with pytest.raises(sp.ContractError, match="saved 2 devices, now 0 devices") as caught:
        manager.restore()
    assert [one.word for one in caught.value.differences] == ["rng"]
    assert streams() == before
    manager.close()
    permitted = sp.CheckpointManager(tmp_path, {"loop": {}}, contract=sp.Contract(permit={"rng"}))
    report = permitted.restore()
    assert report.promise.level == "same_data"
    assert "rng/random stream cuda" in report.left_fresh
    permitted.close()


def test_a_run_that_dies_at_each_epochs_end_has_another_order_in_each_epoch(tmp_path: Path) -> None:
    """Field report B178."""
    orders = []
    for seed in range(3):
        job = build(tmp_path, seed=0 if seed == 0 else 9, save=sp.every(updates=6))
        job.manager.restore()
        orders.append([ids for ids, *_ in train(job, job.manager.progress.step + 6)])
        job.manager.close()
    whole = ResumableLoader(range(22), 4, seed=5)
    assert orders == [[batch.tolist() for batch in whole] for _ in range(3)]
    assert orders[0] != orders[1] != orders[2]


def test_a_validation_between_updates_moves_no_order_of_the_training(tmp_path: Path) -> None:
    def train_with(loader: ResumableLoader, validates: bool) -> list[list[int]]:
        seen = []
        for batch in loader:
            seen.append(batch.tolist())
            if validates:
                torch.rand(5)
                list(ResumableLoader(range(9), 3, seed=1))
        return seen

    plain = train_with(ResumableLoader(range(22), 4, seed=5), False)
    assert train_with(ResumableLoader(range(22), 4, seed=5), True) == plain
