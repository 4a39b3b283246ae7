"""The order of samples: a permutation, the same everywhere, evenly drawn, and pinned for ever."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from safepoint.data import GlobalOrder, share_of_batch
from safepoint.errors import RequestError

# Below this probability an even draw is called uneven. The seeds are fixed, so a test passes always or never.
LEAST_PROBABILITY = 1e-4
BITS = 2**64
GOLDEN = 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    z = (z ^ z // 2**30) * 0xBF58476D1CE4E5B9 % BITS
    z = (z ^ z // 2**27) * 0x94D049BB133111EB % BITS
    return z ^ z // 2**31


def words(key: int, count: int) -> list[int]:
    return [mix((key + k * GOLDEN) % BITS) for k in range(1, count + 1)]


def key_of(seed: int, epoch: int) -> int:
    return mix(((mix((seed + GOLDEN) % BITS) ^ epoch) + GOLDEN) % BITS)


def documented_table(length: int, seed: int, epoch: int) -> list[int]:
    """Compute a short order from its description alone."""
    table = list(range(length))
    for i, word in zip(range(length - 1, 0, -1), words(key_of(seed, epoch), length - 1), strict=True):
        j = word * (i + 1) // BITS
        table[i], table[j] = table[j], table[i]
    return table


def documented_walk(length: int, seed: int, epoch: int, position: int) -> int:
    """Compute one place of a long order from its description alone."""
    root = math.isqrt(length)
    a = root if root * root == length else root + 1
    value = position
    for step in itertools.count():
        if step and value < length:
            return value
        left, right = value // a, value % a
        for round_key in words(key_of(seed, epoch), 8):
            left, right = right, (left + mix((right + round_key) % BITS) // 2**32 * a // 2**32) % a
        value = left * a + right
    raise AssertionError


def evenness(counts: Counter[object], cells: int) -> float:
    """Return the probability of counts at least this uneven, if each of the cells is equally likely."""
    observed = list(counts.values()) + [0] * (cells - len(counts))
    return float(chisquare(observed).pvalue)


def test_splitmix_agrees_with_its_authors_first_outputs() -> None:
    """Source: the reference values of splitmix64 for the state 1234567 (Rosetta Code, Pseudo-random numbers)."""
    assert words(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize(
    ("length", "seed", "epoch", "first"),
    [
        (1, 0, 0, [0]),
        (8, 0, 0, [3, 5, 0, 2, 4, 7, 6, 1]),
        (10, 7, 3, [7, 1, 0, 4, 3, 9, 5, 2, 8, 6]),
        (4096, 1, 0, [3230, 2872, 3824, 2467, 3215]),
        (4097, 1, 0, [2215, 2481, 2033, 3738, 319]),
        (50_000, 42, 1, [37510, 31359, 46295, 16812, 5367]),
        (10**12, 2**64 - 1, 5, [937023150472, 591262685871, 177678689535, 35529257932]),
        (2**63 - 1, 9, 2**63 - 1, [2686517883530919354, 6968552020229192849, 8438161628418433351]),
    ],
)
def test_the_first_indices_never_change(length: int, seed: int, epoch: int, first: list[int]) -> None:
    order = GlobalOrder(length, seed=seed, epoch=epoch)
    assert order.version == "feistel-1"
    assert order.block(0, len(first)) == first


@pytest.mark.parametrize("length", [1, 2, 3, 10, 1000, 4095, 4096])
def test_a_short_order_is_the_one_of_the_description(length: int) -> None:
    assert list(GlobalOrder(length, seed=11, epoch=4)) == documented_table(length, 11, 4)


@pytest.mark.parametrize("length", [4097, 4225, 65_536, 65_537, 10**6 - 1, 10**12, 2**63 - 1])
def test_a_long_order_is_the_one_of_the_description(length: int) -> None:
    order = GlobalOrder(length, seed=11, epoch=4)
    positions = [*range(40), length // 2, length - 2, length - 1]
    assert [order[position] for position in positions] == [documented_walk(length, 11, 4, p) for p in positions]


@pytest.mark.parametrize("length", [1, 2, 5, 4096, 4097, 4225, 10_007])
@pytest.mark.parametrize("epoch", [0, 1])
def test_each_index_stands_at_exactly_one_position(length: int, epoch: int) -> None:
    assert sorted(GlobalOrder(length, seed=3, epoch=epoch).block(0, length)) == list(range(length))


@given(
    length=st.one_of(st.integers(1, 5000), st.integers(1, 10**18)),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 2**63 - 1),
    start=st.integers(0, 10**18),
    size=st.integers(0, 40),
    shuffle=st.booleans(),
)
def test_a_block_equals_its_positions_one_by_one(
    length: int, seed: int, epoch: int, start: int, size: int, shuffle: bool
) -> None:
    order = GlobalOrder(length, seed=seed, epoch=epoch, shuffle=shuffle)
    start %= length
    stop = min(start + size, length)
    block = order.block(start, stop)
    assert block == [order[position] for position in range(start, stop)]
    assert all(type(index) is int and 0 <= index < length for index in block)


def test_without_shuffling_the_index_is_the_position() -> None:
    order = GlobalOrder(10**12, seed=5, shuffle=False)
    assert order.version == "sequential-1"
    assert order.block(10**11, 10**11 + 3) == [10**11, 10**11 + 1, 10**11 + 2]
    assert order[10**12 - 1] == 10**12 - 1


def test_a_huge_order_is_read_anywhere_in_constant_memory() -> None:
    order = GlobalOrder(10**15, seed=1)
    order.block(0, 64)
    tracemalloc.start()
    order.block(10**15 - 64, 10**15)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(order) == 10**15
    assert peak_bytes < 100_000


@pytest.mark.parametrize("length", [2, 3, 4, 5, 6, 7, 8])
def test_every_index_is_equally_likely_at_every_position(length: int) -> None:
    counts: list[Counter[object]] = [Counter() for _ in range(length)]
    for seed in range(1500):
        for position, index in enumerate(GlobalOrder(length, seed=seed)):
            counts[position][index] += 1
    assert [count for count in counts if evenness(count, length) < LEAST_PROBABILITY] == []


@pytest.mark.parametrize("length", [3, 4, 5])
@pytest.mark.parametrize("varied", ["seed", "epoch"])
def test_every_permutation_of_a_few_samples_is_equally_likely(length: int, varied: str) -> None:
    numbers = [{"seed": 77, varied: number} for number in range(60 * math.factorial(length))]
    counts: Counter[object] = Counter(tuple(GlobalOrder(length, **which)) for which in numbers)
    assert evenness(counts, math.factorial(length)) > LEAST_PROBABILITY


@pytest.mark.parametrize("length", [4097, 10_000, 10**12])
@pytest.mark.parametrize("position", [0, 1, 64, 4096])
def test_a_long_order_puts_any_index_at_a_position_over_the_seeds(length: int, position: int) -> None:
    counts: Counter[object] = Counter(GlobalOrder(length, seed=seed)[position] * 32 // length for seed in range(4000))
    assert evenness(counts, 32) > LEAST_PROBABILITY


@pytest.mark.parametrize("length", [4097, 100_000, 10**12])
@pytest.mark.parametrize("gap", [1, 2, 65])
def test_neighbours_in_a_long_order_are_unrelated(length: int, gap: int) -> None:
    block = GlobalOrder(length, seed=13, epoch=2).block(0, 4097)
    steps = [(later - earlier) % length for earlier, later in zip(block, block[gap:], strict=False)]
    assert evenness(Counter(step * 16 // length for step in steps), 16) > LEAST_PROBABILITY


def test_two_epochs_or_seeds_agree_at_no_more_positions_than_chance_gives() -> None:
    length = 20_000
    first = GlobalOrder(length, seed=0, epoch=0).block(0, length)
    others = [GlobalOrder(length, seed=s, epoch=e).block(0, length) for s, e in [(0, 1), (1, 0), (1, 1), (2**63, 0)]]
    # The number of agreements of two random permutations is Poisson with mean 1; more than 9 has probability 1e-7.
    assert max(sum(a == b for a, b in zip(first, other, strict=True)) for other in others) <= 9


@pytest.mark.parametrize("position", [-1, 10, 10**20])
def test_a_position_outside_the_order_is_an_index_error(position: int) -> None:
    with pytest.raises(IndexError, match="10 samples"):
        GlobalOrder(10, seed=0)[position]


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (4, 3), (0, 11)])
def test_a_block_outside_the_order_is_refused(start: int, stop: int) -> None:
    with pytest.raises(RequestError, match="outside the order"):
        GlobalOrder(10, seed=0).block(start, stop)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("length", {"length": 0}),
        ("length", {"length": 2**63}),
        ("length", {"length": True}),
        ("seed", {"seed": -1}),
        ("seed", {"seed": 2**64}),
        ("seed", {"seed": 1.0}),
        ("epoch", {"epoch": -1}),
    ],
)
def test_a_number_outside_its_range_is_refused_by_name(name: str, settings: dict[str, int]) -> None:
    with pytest.raises(RequestError) as caught:
        GlobalOrder(**{"length": 10, "seed": 0, **settings})
    assert caught.value.where == name


@given(start=st.integers(0, 10**15), size=st.integers(0, 500), world_size=st.integers(1, 64))
def test_the_parts_of_all_ranks_are_the_batch_in_order(start: int, size: int, world_size: int) -> None:
    parts = [share_of_batch(start, start + size, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert [position for part in parts for position in part] == list(range(start, start + size))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
