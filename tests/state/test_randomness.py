"""Random streams as items: nothing is drawn, every stream goes on where it was."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from safepoint.errors import CorruptionError
from safepoint.state.item import Permits, SavedItem
from safepoint.state.randomness import (
    GeneratorItem,
    GlobalRandomItem,
    RandomStreams,
)
from tests.state.roundtrip import Stored


@pytest.fixture(autouse=True)
def streams_of_other_tests() -> Iterator[None]:
    streams = RandomStreams.snapshot()
    yield
    streams.put_back()


def draw() -> list[Any]:
    """Draw from each global stream, an odd number of normal values included: they come in pairs."""
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.normal()),
        torch.rand(3).tolist(),
        torch.randn(1).item(),
    ]


def test_global_streams_go_on_where_they_were() -> None:
    """Field reports B171, B173, B181, B182."""
    draw()
    stored = Stored({"rng": GlobalRandomItem()})
    expected = [draw(), draw()]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    stored.restore({"rng": GlobalRandomItem()})
    assert [draw(), draw()] == expected


def test_capture_and_check_draw_nothing() -> None:
    """Field report B179."""
    streams = RandomStreams.snapshot()
    stored = Stored({"rng": GlobalRandomItem()})
    stored.words({"rng": GlobalRandomItem()})
    assert streams.moved() == []


def test_a_snapshot_tells_which_streams_moved_and_puts_them_back() -> None:
    """Field report B177."""
    streams = RandomStreams.snapshot()
    torch.manual_seed(123)
    random.random()
    assert streams.moved() == ["python", "torch"]
    np.random.rand()
    streams.put_back()
    assert streams.moved() == []


def test_states_are_bytes_of_the_tree_and_no_tensors() -> None:
    """Field reports B171, B202."""
    captured = GlobalRandomItem().capture()
    assert captured.tensors == ()
    assert isinstance(captured.plain, dict) and type(captured.plain["torch"]) is bytes


def test_another_number_of_devices_is_a_difference() -> None:
    """Field report B174."""
    plain = GlobalRandomItem().capture().plain
    assert isinstance(plain, dict)
    saved = SavedItem("global_random", {**plain, "xpu": [b"\x00" * 16] * 4})
    item = GlobalRandomItem()
    (found,) = item.check(saved)
    assert (found.word, found.saved, found.current) == ("rng", "4 devices", "0 devices")
    expected = [random.random(), torch.rand(1).item()]
    assert item.apply(saved, Permits(frozenset({"rng"}))) == ["random stream xpu"]
    assert [random.random(), torch.rand(1).item()] == expected


def test_a_malformed_stream_is_damage() -> None:
    with pytest.raises(CorruptionError):
        GlobalRandomItem().check(SavedItem("global_random", None))


def test_a_state_of_python_that_is_cut_within_a_word_is_damage() -> None:
    plain: Any = Stored({"rng": GlobalRandomItem()}).saved["rng"].plain
    version, words, gauss = plain["python"]
    for size in (len(words) - 1, len(words) - 4, 1, 0):
        cut = {**plain, "python": (version, words[:size], gauss)}
        with pytest.raises(CorruptionError):
            GlobalRandomItem().check(SavedItem("global_random", cut))


def test_what_is_applied_is_what_is_given_and_not_what_was_checked_before() -> None:
    item, checked = GlobalRandomItem(), Stored({"rng": GlobalRandomItem()}).saved["rng"]
    draw()
    given = Stored({"rng": GlobalRandomItem()}).saved["rng"]
    expected = draw()
    assert item.check(checked) == []
    item.apply(given, Permits())
    assert draw() == expected


def test_a_state_is_tried_where_numpys_generator_became_one_that_takes_it_after_the_check() -> None:
    plain: Any = Stored({"rng": GlobalRandomItem()}).saved["rng"].plain
    assert plain["numpy"]["bit_generator"] == "MT19937"
    saved = SavedItem("global_random", {**plain, "numpy": {**plain["numpy"], "state": {"key": plain, "pos": 700}}})
    before, item = np.random.mtrand.get_bit_generator(), GlobalRandomItem()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        (found,) = item.check(saved)
    finally:
        np.random.set_bit_generator(before)
    assert (found.subject, found.saved, found.current) == ("global numpy stream", "MT19937", "PCG64")
    with pytest.raises(CorruptionError, match="pos"):
        item.apply(saved, Permits(frozenset({"rng"})))


GENERATORS: dict[str, tuple[Callable[[int], Any], Callable[[str, Any], Any], Callable[[Any], Any]]] = {
    "torch": (
        lambda s: torch.Generator().manual_seed(s),
        GeneratorItem,
        lambda g: torch.rand(1, generator=g).item(),
    ),
    "python": (random.Random, GeneratorItem, lambda g: g.gauss(0, 1)),
    "numpy": (np.random.default_rng, GeneratorItem, lambda g: (float(g.random()), int(g.integers(9, dtype="u4")))),
    "philox": (lambda s: np.random.Generator(np.random.Philox(s)), GeneratorItem, lambda g: float(g.normal())),
    "sfc64": (lambda s: np.random.Generator(np.random.SFC64(s)), GeneratorItem, lambda g: float(g.normal())),
    "mt19937": (lambda s: np.random.Generator(np.random.MT19937(s)), GeneratorItem, lambda g: float(g.normal())),
    "legacy": (np.random.RandomState, GeneratorItem, lambda g: float(g.normal())),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_of_the_user_goes_on_where_it_was(kind: str) -> None:
    make, adapter, take = GENERATORS[kind]
    straight, resumed = make(1), make(2)
    for _ in range(3):
        take(straight)
    Stored({"g": adapter("g", straight)}).restore({"g": adapter("g", resumed)})
    assert [take(resumed) for _ in range(5)] == [take(straight) for _ in range(5)]


@pytest.mark.parametrize(("before", "now"), [("numpy", "philox"), ("legacy", "mt19937"), ("torch", "python")])
def test_a_generator_of_another_kind_is_a_difference_and_can_be_left_fresh(before: str, now: str) -> None:
    stored = Stored({"g": GENERATORS[before][1]("g", GENERATORS[before][0](1))})
    make, adapter, take = GENERATORS[now]
    generator, twin = make(5), make(5)
    assert stored.words({"g": adapter("g", generator)}) == ["g.type"]
    left = stored.restore({"g": adapter("g", generator)}, Permits(frozenset({"g.type"})))
    assert left == {"g": ["the generator"]}
    assert take(generator) == take(twin)
