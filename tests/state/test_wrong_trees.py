"""Wrong plain trees: sealed, decoded, and not what a capture makes.

Real captured trees are changed at one place, and each item must find it in `check`, before anything live is touched, or
take the tree as the other state that it is, down to the same tree when it is captured again.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from safepoint.data.cursor import Cursor, may_repeat
from safepoint.data.loader import ResumableLoader
from safepoint.data.sampler import ResumableSampler
from safepoint.errors import CorruptionError, InternalError, MismatchError, SafepointError
from safepoint.format.plain import decode_plain, encode_plain
from safepoint.state.adapt import Surroundings, make_item
from safepoint.state.item import CapturedItem, Item, Permits, SavedItem
from safepoint.state.names import qualified_parameters
from safepoint.state.optimizers import OptimizerItem
from safepoint.state.randomness import GlobalRandomItem, RandomStreams
from tests.data.datasets import Numbers
from tests.state.roundtrip import read
from tests.state.training import update

VALUES: list[Any] = [
    None, 0, -1, 2**62, 3, "x", "", [], {}, True, ["x"], {"a": 1}, {"$tuple": []}, {"$float": "nan"},
    {"$float": "0x1.8000000000000p+0"}, {"$bytes": "AAAA"}, {"$int": hex(2**70)}, {"$set": []}, {"$size": [2]},
    {"$dtype": "bfloat16"}, {"$tensor": ["nowhere", "tensor", "cpu", False]}, {"$dict": [[1, 2]]},
    {"$scalar": ["float32", "0000803f", "tensor", "cpu", False]}, {"$same": 0},
]  # fmt: skip


class Extra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.tied = self.inner[0]
        self.kept: Any = {"a": [1, 2.5], "t": torch.ones(3)}
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("flag", torch.tensor(True), persistent=False)

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.inner(values)  # type: ignore[no-any-return]


def build() -> dict[str, Item]:
    torch.manual_seed(0)
    model = Extra()
    groups = [{"params": model.inner[0].parameters()}, {"params": model.inner[1].parameters(), "lr": 0.5}]
    adam = torch.optim.AdamW(groups, lr=0.1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parts = [lr_scheduler.LinearLR(adam), lr_scheduler.MultiStepLR(adam, [1, 5])]
    live: dict[str, Any] = {
        "model": model,
        "adam": adam,
        "sgd": sgd,
        "sequential": lr_scheduler.SequentialLR(adam, parts, [2]),
        "plateau": lr_scheduler.ReduceLROnPlateau(sgd),
        "lambda": lr_scheduler.LambdaLR(sgd, lambda epoch: 0.5**epoch),
        "scaler": torch.amp.GradScaler("cpu"),
        "torch": torch.Generator(),
        "numpy": np.random.default_rng(0),
        "philox": np.random.Generator(np.random.Philox(0)),
        "legacy": np.random.RandomState(0),
        "python": random.Random(0),
        "cursor": Cursor(3, replay=may_repeat(2)),
        "loader": ResumableLoader(Numbers(6), batch_size=2, seed=0),
        "sampler": ResumableSampler(Numbers(6), batch_size=2, seed=0),
        "dict": {"a": [1, (2,)], 1: {4}, "v": torch.ones(2, 3).t(), "s": torch.eye(2).to_sparse(), "n": np.float32(1)},
        "list": [np.ones(2), torch.zeros((), dtype=torch.int64), torch.ones(2, requires_grad=True)],
    }
    made: dict[str, Item] = {}
    around = Surroundings(
        lambda: qualified_parameters({"model": model}),
        lambda: {name: item for name, item in made.items() if isinstance(item, OptimizerItem)},
    )
    for name, entry in live.items():
        made[name] = make_item(name, entry, surroundings=around)
    return {**made, "rng": GlobalRandomItem()}


def advance(items: dict[str, Any]) -> None:
    for index in range(2):
        for name in ("adam", "sgd"):
            update(items["model"]._module, items[name].optimizer, index)
        items["sequential"]._scheduler.step()
        items["lambda"]._scheduler.step()
    next(iter(items["loader"]._stateful))


def text_of(captured: CapturedItem) -> str:
    return json.dumps(encode_plain(captured.plain))


def picture(items: dict[str, Item]) -> dict[str, Any]:
    captured = {name: item.capture() for name, item in items.items()}
    return {name: (text_of(one), [read(tensor.source) for tensor in one.tensors]) for name, one in captured.items()}


def paths(form: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield above
    pairs = form.items() if isinstance(form, dict) else enumerate(form) if isinstance(form, list) else ()
    for key, value in pairs:
        yield from paths(value, (*above, key))


def holder_of(form: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        form = form[key]
    return form


def change(form: Any, path: tuple[Any, ...], draw: random.Random) -> Any:
    """Return the form with one place dropped, replaced, exchanged with another, shortened or added to."""
    form = copy.deepcopy(form)
    if not path:
        return copy.deepcopy(draw.choice(VALUES))
    holder, key = holder_of(form, path), path[-1]
    kind = draw.choice(["drop", "replace", "replace", "swap", "truncate", "extra", "repeat"])
    if kind == "drop":
        del holder[key]
    elif kind == "swap":
        other = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        holder[key], holder[other] = holder[other], holder[key]
    elif kind == "truncate" and isinstance(holder[key], str | list):
        holder[key] = holder[key][: len(holder[key]) // 2]
    elif kind == "extra" and isinstance(holder, dict):
        holder["extra"] = copy.deepcopy(draw.choice(VALUES))
    elif kind == "repeat" and isinstance(holder, list):
        holder.append(copy.deepcopy(holder[key]))
    else:
        holder[key] = copy.deepcopy(draw.choice(VALUES))
    return form


def is_hint(path: tuple[Any, ...]) -> bool:
    """Return whether a place names a kind of device, which a restore is free to follow."""
    return "devices" in path or (len(path) > 1 and path[-2] in ("$tensor", "$scalar", "$view") and path[-1] >= 2)


def play(name: str, items: dict[str, Item], saved: SavedItem, data: dict[str, bytes]) -> str:
    """Restore one item as a restore does, and return what became of the tree."""
    before = picture(items)
    try:
        differences = items[name].check(saved)
    except (CorruptionError, MismatchError):
        assert picture(items) == before
        return "found"
    except SafepointError as exc:
        assert not isinstance(exc, InternalError)
        return "found"
    assert picture(items) == before
    if differences:
        return "found"
    targets = items[name].targets(saved, Permits())
    for key, target in targets.items():
        target.memory()[:] = data[key]
        target.commit()
    applied = picture(items)
    try:
        items[name].apply(saved, Permits())
    except CorruptionError as exc:
        # Whether indices lie inside a sparse tensor is known with its data, and before the item is written to.
        assert "sparse" in str(exc) and picture(items) == applied
        return "found"
    return "taken"


@pytest.mark.parametrize("count", [15, pytest.param(300, marks=[pytest.mark.soak, pytest.mark.timeout(0)])])
@pytest.mark.parametrize("name", list(build()))
def test_a_wrong_tree_is_found_before_anything_is_touched(name: str, count: int) -> None:
    source: Any = build()
    advance(source)
    captured = source[name].capture()
    form = json.loads(text_of(captured))
    specs = {one.spec.name: one.spec for one in captured.tensors}
    data = {one.spec.name: read(one.source) for one in captured.tensors}
    places = [path for path in paths(form) if not is_hint(path)]
    streams = RandomStreams.snapshot()
    fates = []
    for number in range(count):
        seed = f"{name}/{number}"
        draw = random.Random(seed)
        path = draw.choice(places)
        wrong = change(form, path, draw)
        print(f"seed {seed!r}: {path} -> {json.dumps(wrong)[:2000]}")
        try:
            plain = decode_plain(wrong)
        except CorruptionError:
            continue
        live = build()
        fates.append(play(name, live, SavedItem(captured.type, plain, specs), data))
        # What a loader has handed out ahead, for one, it hands out again: its state then differs, and may.
        if fates[-1] == "taken" and captured.type != "stateful" and not getattr(live[name], "keeps_own", False):
            assert text_of(live[name].capture()) == json.dumps(wrong), path
        streams.put_back()
    assert "found" in fates


@pytest.mark.parametrize("name", list(build()))
def test_a_captured_tree_is_taken_as_it_is(name: str) -> None:
    source: Any = build()
    advance(source)
    captured = source[name].capture()
    specs = {one.spec.name: one.spec for one in captured.tensors}
    data = {one.spec.name: read(one.source) for one in captured.tensors}
    live = build()
    saved = SavedItem(captured.type, decode_plain(json.loads(text_of(captured))), specs)
    assert play(name, live, saved, data) == "taken"
    assert text_of(live[name].capture()) == text_of(captured)


def exchange_names(form: Any) -> None:
    states = form["state"]["model"]
    first, second = states["inner.0.weight"]["exp_avg"]["$tensor"], states["inner.0.weight"]["exp_avg_sq"]["$tensor"]
    first[0], second[0] = second[0], first[0]


def name_twice(form: Any) -> None:
    form["groups"][0].append(form["groups"][0][-1])


def make_keys_equal(form: Any) -> None:
    # 1 is there already, and what is equal to it would take its place.
    form["state"]["$dict"].append([{"$numpy": ["<f4", "0000803f"]}, "x"])


def make_key_a_tensor(form: Any) -> None:
    form["state"]["$dict"].append([{"$scalar": ["float32", "0000803f", "tensor", "cpu", False]}, "x"])


def write_object_as_pairs(form: Any) -> None:
    form["state"] = {"$dict": list(form["state"].items())}


def set_unknown_mode(form: Any) -> None:
    form["state"]["threshold_mode"] = "other"


def set_other_bound(form: Any) -> None:
    form["state"]["mode_worse"] = {"$float": "0x1.0000000000000p+0"}


def add_own_state(form: Any) -> None:
    form["extra"] = {"more": 1}


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("adam", exchange_names),
        ("adam", add_own_state),
        ("sequential", name_twice),
        ("dict", make_keys_equal),
        ("dict", make_key_a_tensor),
        ("plateau", write_object_as_pairs),
        ("plateau", set_unknown_mode),
        ("plateau", set_other_bound),
    ],
)
def test_a_tree_that_would_be_captured_as_another_one_is_found(name: str, spoil: Callable[[Any], None]) -> None:
    """Found only by reading the state back, it would be called a bug of ours, after everything was touched."""
    source: Any = build()
    advance(source)
    captured = source[name].capture()
    form = json.loads(text_of(captured))
    spoil(form)
    specs = {one.spec.name: one.spec for one in captured.tensors}
    data = {one.spec.name: read(one.source) for one in captured.tensors}
    try:
        plain = decode_plain(form)
    except CorruptionError:
        return
    assert play(name, build(), SavedItem(captured.type, plain, specs), data) == "found"
