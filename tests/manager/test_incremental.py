"""Saves that write what has changed and refer to the rest: each checkpoint stands for its own boundary, whole."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

import safepoint as sp
from safepoint.catalog import Generation, examine_all, read_lineage
from safepoint.errors import AbortedError, RequestError
from safepoint.format.extent import split_rows
from safepoint.format.index import Index
from safepoint.restoring.validate import read_indexes
from safepoint.restoring.verify import verify_generation
from safepoint.saving import form, increment
from safepoint.settings import full_every
from safepoint.storage.local import LocalStorage

COLUMNS = 4
CHUNK_ROWS = 2
CHUNK_BYTES = CHUNK_ROWS * COLUMNS * 4
DATA = "rank-00000-of-00001.safetensors"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut boxes into chunks of two rows of four floats."""
    monkeypatch.setattr(form, "split_rows", lambda shape, size: split_rows(shape, size, limit_bytes=CHUNK_BYTES))


class Rows(nn.Module):
    """Tensors of several chunks, one that has none, and one of another type."""

    def __init__(self) -> None:
        super().__init__()
        self.long = nn.Parameter(torch.arange(40.0).reshape(10, COLUMNS))
        self.short = nn.Parameter(torch.ones(3, COLUMNS))
        self.register_buffer("empty", torch.empty(0, COLUMNS))
        self.register_buffer("wide", torch.arange(12, dtype=torch.float64).reshape(6, 2))
        self.register_buffer("turned", torch.arange(24.0).reshape(COLUMNS, 6).T)


Bits = dict[str, torch.Tensor]


def bits(model: nn.Module) -> Bits:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def change(model: nn.Module, name: str, row: int) -> None:
    with torch.no_grad():
        model.state_dict(keep_vars=True)[name][row] += 1


def changed_bytes(before: Bits, after: Bits) -> int:
    """Return the bytes of the chunks in which something differs."""
    total = 0
    for name, old in before.items():
        row_bytes = old.element_size() * old.shape[1]
        rows = max(1, CHUNK_BYTES // row_bytes)
        for start in range(0, len(old), rows):
            part, other = old[start : start + rows], after[name][start : start + rows]
            total += 0 if torch.equal(part, other) else part.numel() * part.element_size()
    return total


class Run:
    """Hold a manager that saves what a model holds, and what it held at each step."""

    def __init__(self, url: Path, *, incremental: bool | int = True, background: bool = False, **options: object):
        self.url, self.model = url, Rows()
        self.manager = sp.CheckpointManager(
            url, {"model": self.model}, incremental=incremental, background=background, **options
        )
        self.report = self.manager.restore()
        self.held: dict[int, Bits] = {}
        self.results: list[sp.SaveResult] = []

    def save(self) -> sp.SaveResult:
        self.manager.after_update()
        self.held[self.manager.progress.step] = bits(self.model)
        self.results.append(self.manager.save().wait())
        return self.results[-1]

    def save_at_random(self, chance: random.Random, count: int) -> None:
        """Change a few rows of a few tensors before each save; sometimes none."""
        names = [name for name, tensor in self.model.state_dict().items() if len(tensor)]
        for _ in range(count):
            for _ in range(chance.randint(0, 3)):
                name = chance.choice(names)
                change(self.model, name, chance.randrange(len(self.model.state_dict()[name])))
            self.save()


def generations(url: Path) -> list[Generation]:
    """Return the generations, oldest first."""
    storage = LocalStorage(url)
    return examine_all(storage, read_lineage(storage))[::-1]


def ancestors(url: Path) -> list[list[int]]:
    """Return by generation the steps that it refers to."""
    return [[int(name[5:17]) for name in one.manifest.ancestors] for one in generations(url) if one.manifest]


def index_of(url: Path, generation: Generation) -> Index:
    assert generation.manifest is not None
    return read_indexes(LocalStorage(url), generation.manifest)[0]


def restored(url: Path, step: int) -> Bits:
    model = Rows()
    for tensor in model.state_dict().values():
        tensor.fill_(-1)
    sp.open_run(url).load(into={"model": model}, step=step)
    return bits(model)


def assert_equal(found: Bits, expected: Bits) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("background", [False, True])
def test_every_checkpoint_is_its_own_boundary_and_writes_what_changed(
    tmp_path: Path, chance: random.Random, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads digest, some chunks each.

    Spec: C13.3
    """
    monkeypatch.setattr(increment, "_TASK_BYTES", 3 * CHUNK_BYTES)
    run = Run(tmp_path, background=background)
    run.save_at_random(chance, 7)
    run.manager.close()
    total = sum(tensor.nbytes for tensor in run.held[1].values())
    for step, one in enumerate(generations(tmp_path), 1):
        assert verify_generation(LocalStorage(tmp_path), one).findings == ()
        assert_equal(restored(tmp_path, step), run.held[step])
        result = run.results[step - 1]
        written = total - result.referenced_bytes
        changed = total if step == 1 else changed_bytes(run.held[step - 1], run.held[step])
        assert written == changed
        index = index_of(tmp_path, one)
        assert index.objects[0].size_bytes - index.header_bytes == written


def test_a_reference_names_the_file_in_which_the_bytes_lie(tmp_path: Path) -> None:
    """Spec: C13.3"""
    run = Run(tmp_path)
    run.save()
    for row in (0, 9, 4):
        change(run.model, "long", row)
        run.save()
    run.manager.close()
    assert ancestors(tmp_path) == [[], [1], [1, 2], [1, 2, 3]]
    index = index_of(tmp_path, generations(tmp_path)[-1])
    (long,) = (tensor for tensor in index.tensors if tensor.name == "long")
    steps = [int(index.objects[chunk.object].generation[5:17]) for chunk in long.chunks]
    assert steps == [2, 1, 4, 1, 3]


def test_the_digest_of_an_item_is_that_of_a_full_save(tmp_path: Path) -> None:
    """Spec: F7.3"""
    runs = [Run(tmp_path / "some", incremental=True), Run(tmp_path / "all", incremental=False)]
    for run in runs:
        run.save()
        change(run.model, "long", 5)
        run.save()
        run.manager.close()
    some, full = (generations(run.url)[-1].manifest for run in runs)
    assert some is not None and full is not None
    assert some.ancestors and not full.ancestors
    assert some.items["model"] == full.items["model"]


def test_the_header_of_a_file_lists_the_rows_that_it_holds(tmp_path: Path) -> None:
    """Spec: F3.3"""
    run = Run(tmp_path)
    run.save()
    for row in (2, 8):
        change(run.model, "long", row)
    change(run.model, "wide", 5)
    run.save()
    run.manager.close()
    newest = generations(tmp_path)[-1].text
    with safe_open(tmp_path / "generations" / newest / DATA, framework="pt") as file:
        found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (the file is no dict)
    held = run.held[2]
    expected = {
        "model/long": held["long"][[2, 3, 8, 9]],
        "model/wide": held["wide"][4:6],
        "model/empty": held["empty"],
    }
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_one_of_so_many_saves_is_full_and_so_is_the_first_of_a_start(tmp_path: Path) -> None:
    """Spec: C13.4"""
    run = Run(tmp_path, incremental=3)
    for _ in range(5):
        run.save()
    run.manager.close()
    assert ancestors(tmp_path) == [[], [1], [1], [], [4]]
    run = Run(tmp_path, incremental=3)
    run.save()
    run.save()
    run.manager.close()
    assert ancestors(tmp_path)[-2:] == [[], [6]]


def test_after_a_roll_back_no_other_branch_is_referred_to(tmp_path: Path) -> None:
    """Spec: C13.1, C13.4"""
    run = Run(tmp_path)
    for _ in range(3):
        change(run.model, "long", 0)
        run.save()
    run.manager.restore(step=1, branch=True)
    run.save()
    run.save()
    run.manager.close()
    live = [one.manifest for one in generations(tmp_path) if one.name.incarnation == 2]
    assert [len(one.ancestors) for one in live if one is not None] == [0, 1]


def test_true_stands_for_sixteen() -> None:
    assert [full_every(value) for value in (True, False, 1, 5)] == [16, 1, 1, 5]


def test_a_tensor_that_has_another_shape_or_type_is_written(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save()
    run.model.short = nn.Parameter(torch.ones(5, COLUMNS))
    run.model.wide = run.model.wide.view(torch.int64)
    run.save()
    run.manager.close()
    index = index_of(tmp_path, generations(tmp_path)[-1])
    own = {tensor.name for tensor in index.tensors if {chunk.object for chunk in tensor.chunks} == {0}}
    assert own == {"short", "wide"}


def test_a_save_whose_base_is_gone_is_not_made_and_the_next_one_is_full(tmp_path: Path) -> None:
    """Spec: C5.1, C13.4"""
    run = Run(tmp_path)
    run.save()
    (tmp_path / "generations" / generations(tmp_path)[0].text / DATA).unlink()
    with pytest.raises(AbortedError, match="not stored as voted"):
        run.save()
    run.save()
    run.manager.close()
    assert ancestors(tmp_path) == [[], []]
    assert_equal(restored(tmp_path, 3), run.held[3])


def test_damage_of_a_base_is_that_of_all_that_refer_to_it_and_an_independent_one_is_taken(tmp_path: Path) -> None:
    """Spec: C13.2, C13.5, C10.2"""
    run = Run(tmp_path, incremental=3)
    for step in range(1, 7):
        change(run.model, "short", 0)
        if step == 4:
            change(run.model, "long", 0)
        run.save()
    run.manager.close()
    four = generations(tmp_path)[3]
    (long,) = (tensor for tensor in index_of(tmp_path, four).tensors if tensor.name == "long")
    path = tmp_path / "generations" / four.text / DATA
    data = bytearray(path.read_bytes())
    data[long.chunks[0].offset_bytes] ^= 1
    path.write_bytes(data)
    found = {one.name.step: verify_generation(LocalStorage(tmp_path), one) for one in generations(tmp_path)}
    assert {step: one.holds for step, one in found.items()} == dict.fromkeys((1, 2, 3), True) | dict.fromkeys(
        (4, 5, 6), False
    )
    assert all("model/long" in str(found[step].findings[0]) for step in (4, 5, 6))
    run = Run(tmp_path)
    run.manager.close()
    assert run.report.step == 3
    assert len(run.report.refused) == 3
    assert_equal(bits(run.model), restored(tmp_path, 3))


def test_retention_leaves_what_a_kept_checkpoint_refers_to_and_no_more(tmp_path: Path) -> None:
    """Spec: C12.4, C12.5, C13.2"""
    run = Run(tmp_path, incremental=3, keep=sp.keep(last=2))
    for step in range(1, 11):
        change(run.model, "long", step % 10)
        run.save()
        for one in sp.open_run(tmp_path).checkpoints():
            assert_equal(restored(tmp_path, one.step), run.held[one.step])
    run.manager.close()
    kept = [one for one in generations(tmp_path) if one.state.value == "committed"]
    assert [one.name.step for one in kept] == [9, 10]
    assert [len(one.manifest.ancestors) for one in kept if one.manifest is not None] == [1, 0]
    files = {path.parent.name for path in tmp_path.glob(f"generations/*/{DATA}")}
    needed = {name for one in kept if one.manifest is not None for name in [one.text, *one.manifest.ancestors]}
    marked = {one.text for one in generations(tmp_path) if one.state.value == "deleted"}
    assert needed <= files <= needed | marked


def test_costs_tell_what_was_referred_to(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save()
    run.save()
    run.manager.close()
    total = sum(tensor.nbytes for tensor in run.held[1].values())
    assert [cost.referenced_bytes for cost in run.manager.stats.saves] == [0, total]
    assert "digest" in run.manager.stats.saves[1].phases_s
    assert run.results[1].size_bytes < run.results[0].size_bytes


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "3", None])
def test_a_number_of_saves_that_is_none_is_refused(tmp_path: Path, wrong: object) -> None:
    with pytest.raises(RequestError, match="incremental"):
        sp.CheckpointManager(tmp_path, {}, incremental=wrong)  # type: ignore[arg-type]
