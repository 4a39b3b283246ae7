"""Reading a run without being it, and models under the names of their wrappers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import safepoint as sp
from tests.manager.jobs import Net, bits, build, die, picture, streams, train


def listing(url: Path) -> dict[str, str]:
    """Return every file with the digest of its bytes, and every folder."""
    return {
        str(path.relative_to(url)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(url.rglob("*"))
    }


def test_loading_joins_nothing_writes_nothing_and_moves_nothing_else(tmp_path: Path) -> None:
    job = build(tmp_path, save=sp.every(updates=2))
    train(job, 4)
    at_four = picture(job)
    before = listing(tmp_path)
    other = build(tmp_path / "elsewhere", seed=8)
    drawn = streams()

    run = sp.open_run(tmp_path)
    report = run.load(into={"model": other.model})

    # The run is being trained by another manager all the while.
    assert listing(tmp_path) == before
    assert streams() == drawn
    assert report.step == 4
    assert picture(other)["model"] == at_four["model"]
    assert [one.step for one in run.checkpoints()] == [4, 2]
    assert (run.manifest().step, run.manifest(2).step) == (4, 2)
    train(job, 5)
    job.manager.close()


def test_an_older_step_is_loaded_by_its_number(tmp_path: Path) -> None:
    job = build(tmp_path, save=sp.every(updates=1))
    train(job, 1)
    at_one = picture(job)
    train(job, 3)
    die(job)
    other = build(tmp_path / "elsewhere", seed=8)

    assert sp.open_run(tmp_path).load({"model": other.model, "optimizer": other.optimizer}, step=1).step == 1

    assert picture(other)["model"] == at_one["model"]
    assert picture(other)["optimizer"] == at_one["optimizer"]
    with pytest.raises(sp.NotFoundError):
        sp.open_run(tmp_path).load({"model": other.model}, step=9)
    with pytest.raises(sp.NotFoundError):
        sp.open_run(tmp_path).manifest(9)


def test_a_path_without_a_run_is_an_error_and_stays_without_one(tmp_path: Path) -> None:
    """Field report B150."""
    for url in (tmp_path / "typo", tmp_path):
        with pytest.raises(sp.NotFoundError, match="no run here"):
            sp.open_run(url)
    assert list(tmp_path.iterdir()) == []


def test_loading_what_does_not_fit_or_nothing_is_refused_before_anything_is_touched(tmp_path: Path) -> None:
    """Field reports B146, B153."""
    job = build(tmp_path)
    train(job, 1)
    job.manager.save()
    die(job)
    run = sp.open_run(tmp_path)
    other = nn.Linear(4, 1)
    before = bits(dict(other.state_dict()))

    with pytest.raises(sp.MismatchError, match=r"body\.0\.weight"):
        run.load({"model": other})
    with pytest.raises(sp.RequestError, match="nothing is to be loaded"):
        run.load({})
    with pytest.raises(sp.MismatchError, match="'weights'"):
        run.load({"weights": other})

    assert bits(dict(other.state_dict())) == before


def test_a_load_under_other_names_says_which_items_there_are_and_never_succeeds_in_nothing(tmp_path: Path) -> None:
    job = build(tmp_path)
    train(job, 1)
    job.manager.save()
    die(job)
    run = sp.open_run(tmp_path)
    other = Net()
    before = bits(dict(other.state_dict()))

    with pytest.raises(sp.MismatchError) as named:
        run.load({"net": other})
    assert "The checkpoint holds the items 'model', " in named.value.remedy
    assert "restore(" not in str(named.value) and "Contract(" not in str(named.value)
    for into, permit in (({"net": other}, "net.added"), ({"optimizer": other}, "optimizer.type")):
        with pytest.raises(sp.MismatchError, match="nothing was loaded"):
            run.load(into, permit={permit})
    assert bits(dict(other.state_dict())) == before
    with pytest.raises(sp.MismatchError, match=r"load\(\.\.\., permit=\{'model"):
        run.load({"model": nn.Linear(4, 1)})
    assert run.load({"model": other, "net": nn.Linear(1, 1)}, permit={"net.added"}).left_fresh == ("net",)
    assert bits(dict(other.state_dict())) == bits(dict(job.model.state_dict()))


def test_what_is_no_mapping_is_a_wrong_call_and_a_missing_step_is_told_with_those_there_are(tmp_path: Path) -> None:
    job = build(tmp_path, save=sp.every(updates=2))
    train(job, 5)
    die(job)
    run = sp.open_run(tmp_path)
    into: Any = job.model
    with pytest.raises(sp.RequestError, match="live objects by item name"):
        run.load(into)
    with pytest.raises(sp.NotFoundError, match="found steps 2, 4"):
        run.manifest(step=3)


def test_damage_is_found_while_loading_and_the_older_checkpoint_taken(tmp_path: Path) -> None:
    job = build(tmp_path, save=sp.every(updates=1))
    train(job, 1)
    at_one = picture(job)["model"]
    train(job, 2)
    die(job)
    (file,) = (tmp_path / "generations").glob("step-000000000002-*/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    other = build(tmp_path / "elsewhere", seed=8)

    # Only what is asked for is read: the damage lies in the last tensor, which is one of the optimizer's.
    assert sp.open_run(tmp_path).load({"model": other.model}).step == 2
    report = sp.open_run(tmp_path).load({"model": other.model, "optimizer": other.optimizer})

    assert (report.step, len(report.refused)) == (1, 1)
    assert picture(other)["model"] == at_one


class Inner(nn.Module):
    """Has a submodule that is really called module."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.head = nn.Linear(2, 1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.head(self.module(values))


def within(wrap: Callable[[nn.Module], Any], model: nn.Module) -> nn.Module:
    """Return a model whose inner part is wrapped, as is usual when only a part is compiled."""
    return nn.ModuleDict({"backbone": wrap(model), "tail": nn.Linear(1, 1)})


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "data parallel": nn.DataParallel,
    "compiled data parallel": lambda model: torch.compile(nn.DataParallel(model), backend="eager"),
}


@pytest.mark.parametrize("saved_as", list(WRAPPERS))
@pytest.mark.parametrize("place", ["whole", "within"])
def test_a_model_is_loaded_through_any_wrapper_from_any_wrapper(tmp_path: Path, saved_as: str, place: str) -> None:
    """Field reports B139, B141, B142."""

    def make(wrapper: str) -> Any:
        wrap = WRAPPERS[wrapper]
        return wrap(Inner()) if place == "whole" else within(wrap, Inner())

    model = make(saved_as)
    optimizer = torch.optim.Adam(model.parameters())
    sum(one.square().sum() for one in model.parameters()).backward()
    optimizer.step()
    manager = sp.CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer})
    manager.after_update()
    manager.save()
    manager.close()
    expected = [bits(one) for one in model.parameters()], bits(optimizer.state_dict()["state"])

    for wrapper in WRAPPERS:
        other = make(wrapper)
        moments = torch.optim.Adam(other.parameters())
        manager = sp.CheckpointManager(tmp_path, {"model": other, "optimizer": moments})
        assert manager.restore().promise.level == "exact", wrapper
        found = [bits(one) for one in other.parameters()], bits(moments.state_dict()["state"])
        assert found == expected, wrapper
        manager.close()


def test_wrapping_after_the_restore_and_before_it_are_alike(tmp_path: Path) -> None:
    """Field report B142."""
    model = Inner()
    manager = sp.CheckpointManager(tmp_path, {"model": nn.DataParallel(model)})
    manager.save()
    manager.close()
    other = Inner()
    manager = sp.CheckpointManager(tmp_path, {"model": other})
    manager.restore()
    wrapped = nn.DataParallel(other)
    manager.save()
    manager.close()
    assert bits(dict(wrapped.module.state_dict())) == bits(dict(model.state_dict()))


def test_a_model_on_the_meta_device_is_refused_instead_of_left_uninitialised(tmp_path: Path) -> None:
    """Field report B145."""
    manager = sp.CheckpointManager(tmp_path, {"model": Inner()})
    manager.save()
    manager.close()
    with torch.device("meta"):
        hollow = Inner()
    with pytest.raises(sp.SafepointError, match="meta"):
        sp.CheckpointManager(tmp_path, {"model": hollow}).restore()
