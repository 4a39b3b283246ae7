"""A restore that fails after it has written to live objects says so, and one that falls back covers what it wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import safepoint as sp
from safepoint.storage.local import LocalStorage
from tests.build import flip


def line(value: float) -> nn.Module:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def save(url: Path, value: float, *, items: dict[str, nn.Module] | None = None, **options: object) -> None:
    """Save the next step, at which all parameters have a value."""
    model = line(0.0)
    manager = sp.CheckpointManager(url, {"model": model, **(items or {})}, **options)  # type: ignore[arg-type]
    with manager:
        manager.restore()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        manager.after_update()
        manager.save()


def damage(url: Path, step: int) -> None:
    """Flip a bit in the last tensor of a step; those before it are sound."""
    (file,) = url.glob(f"generations/step-{step:012d}-*/*.safetensors")
    flip(LocalStorage(str(url)), str(file.relative_to(url)))


def values(model: nn.Module) -> set[float]:
    return {value for parameter in model.parameters() for value in parameter.flatten().tolist()}


def check_says_mixture(error: sp.SafepointError) -> None:
    assert "may hold a mixture of states" in str(error)
    assert str(error).count("Nothing was changed") == 0
    assert "may hold a mixture of states" in error.remedy


def test_damage_in_all_checkpoints_says_that_live_objects_were_written_to(tmp_path: Path) -> None:
    """Spec: C11.3"""
    save(tmp_path, 1.0)
    damage(tmp_path, 1)
    model = line(9.0)
    manager = sp.CheckpointManager(tmp_path, {"model": model})
    with pytest.raises(sp.CorruptionError) as caught:
        manager.restore()
    assert values(model) != {9.0}
    check_says_mixture(caught.value)
    manager.close()


def test_loading_without_joining_says_that_live_objects_were_written_to(tmp_path: Path) -> None:
    """Spec: C11.3"""
    save(tmp_path, 1.0)
    damage(tmp_path, 1)
    model = line(9.0)
    with pytest.raises(sp.CorruptionError) as caught:
        sp.open_run(tmp_path).load({"model": model})
    assert values(model) != {9.0}
    check_says_mixture(caught.value)


def test_an_older_checkpoint_that_the_contract_refuses_leaves_a_mixture_and_says_so(tmp_path: Path) -> None:
    """Spec: C11.3"""
    save(tmp_path, 1.0, config={"a": 1})
    save(tmp_path, 2.0, config={"a": 2}, contract=sp.Contract(permit={"config"}))
    damage(tmp_path, 2)
    model = line(9.0)
    manager = sp.CheckpointManager(tmp_path, {"model": model}, config={"a": 2})
    with pytest.raises(sp.ContractError) as caught:
        manager.restore()
    assert values(model) != {9.0}
    check_says_mixture(caught.value)
    assert "permit={'config'}" in str(caught.value)
    # Until a restore succeeds the manager does nothing with these objects.
    with pytest.raises(sp.InternalError, match="mixture"):
        manager.after_update()
    with pytest.raises(sp.InternalError, match="mixture"):
        manager.save()
    manager.close()

    manager = sp.CheckpointManager(tmp_path, {"model": model}, config={"a": 2}, contract=sp.Contract(permit={"config"}))
    assert manager.restore().step == 1
    assert values(model) == {1.0}
    manager.after_update()
    manager.close()


def test_an_older_checkpoint_that_does_not_fit_leaves_a_mixture_and_says_so(tmp_path: Path) -> None:
    """Spec: C11.3"""
    save(tmp_path, 1.0)
    save(tmp_path, 2.0, items={"other": line(5.0)}, contract=sp.Contract(permit={"other.added"}))
    damage(tmp_path, 2)
    manager = sp.CheckpointManager(tmp_path, {"model": line(9.0), "other": line(9.0)})
    with pytest.raises(sp.MismatchError, match=r"other\.added") as caught:
        manager.restore()
    check_says_mixture(caught.value)
    manager.close()


def test_a_checkpoint_that_is_refused_before_anything_is_read_says_that_nothing_was_changed(tmp_path: Path) -> None:
    save(tmp_path, 1.0, config={"a": 1})
    model = line(9.0)
    manager = sp.CheckpointManager(tmp_path, {"model": model}, config={"a": 2})
    with pytest.raises(sp.ContractError, match="Nothing was changed"):
        manager.restore()
    assert values(model) == {9.0}
    manager.close()


def test_a_fallback_that_leaves_fresh_what_was_written_before_is_refused(tmp_path: Path) -> None:
    """The older checkpoint has no `extra`: it would stay as the damaged one filled it, called fresh.

    Spec: C11.3
    """
    permitted = sp.Contract(permit={"extra.added"})
    save(tmp_path, 1.0)
    save(tmp_path, 2.0, items={"extra": line(5.0)}, contract=permitted)
    damage(tmp_path, 2)
    extra = line(9.0)
    manager = sp.CheckpointManager(tmp_path, {"model": line(9.0), "extra": extra}, contract=permitted)
    with pytest.raises(sp.MismatchError, match=r"does not hold.*extra") as caught:
        manager.restore()
    check_says_mixture(caught.value)
    manager.close()


def test_a_late_item_that_is_damaged_says_that_it_was_written_to(tmp_path: Path) -> None:
    """Spec: C11.3"""
    save(tmp_path, 1.0, items={"extra": line(5.0)}, contract=sp.Contract(permit={"extra.added"}))
    manager = sp.CheckpointManager(tmp_path, {"model": line(9.0)})
    manager.restore(late=["extra"])
    damage_item(tmp_path, "extra")
    with pytest.raises(sp.CorruptionError) as caught:
        manager.register("extra", line(9.0))
    check_says_mixture(caught.value)
    # Whatever held the object is not to train on with it.
    for go_on in (manager.after_update, manager.save):
        with pytest.raises(sp.InternalError, match="mixture"):
            go_on()
    manager.close()


def test_a_late_item_that_does_not_fit_leaves_the_manager_usable(tmp_path: Path) -> None:
    save(tmp_path, 1.0, items={"extra": line(5.0)}, contract=sp.Contract(permit={"extra.added"}))
    manager = sp.CheckpointManager(tmp_path, {"model": line(9.0)})
    manager.restore(late=["extra"])
    with pytest.raises(sp.MismatchError):
        manager.register("extra", nn.Linear(7, 7))
    manager.register("extra", line(9.0))
    manager.after_update()
    manager.save()
    manager.close()


def test_no_checkpoint_any_more_is_no_fresh_start_for_a_mixture(tmp_path: Path) -> None:
    """Spec: C11.3"""
    save(tmp_path, 1.0)
    damage(tmp_path, 1)
    manager = sp.CheckpointManager(tmp_path, {"model": line(9.0)})
    with pytest.raises(sp.CorruptionError):
        manager.restore()
    for folder in (tmp_path / "generations", tmp_path / "journal"):
        shutil.rmtree(folder)
        folder.mkdir()
    with pytest.raises(sp.NotFoundError):
        manager.restore()
    with pytest.raises(sp.InternalError, match="mixture"):
        manager.save()
    manager.close()


def damage_item(url: Path, name: str) -> None:
    """Flip a bit of the last tensor of an item, wherever the file has it."""
    (file,) = url.glob("generations/*/*.safetensors")
    data = bytearray(file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    end = max(entry["data_offsets"][1] for key, entry in header.items() if key.startswith(f"{name}/"))
    data[8 + length + end - 1] ^= 1
    file.write_bytes(data)
