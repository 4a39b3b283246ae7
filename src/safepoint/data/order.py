"""The order of samples, as a function of numbers.

A position is a place in the order of one epoch, counted from 0; an index is a place in the data set. `GlobalOrder`
gives the index at any position without a stored permutation, so that the position alone is the whole state of an epoch.

Invariants:

1. The order depends on (length, seed, epoch, shuffle) and on the algorithm's name, on nothing else: not on ranks,
   workers, batch size, numpy, or the machine.
2. Every index from 0 to length - 1 stands at exactly one position.
3. An algorithm, once named, never changes. Another algorithm gets another name, which is part of every saved state.

All arithmetic below is on unsigned 64-bit integers, modulo 2**64. G is 0x9E3779B97F4A7C15.

- ``mix(x)``: the finaliser of splitmix64: x ^= x >> 30; x *= 0xBF58476D1CE4E5B9; x ^= x >> 27; x *= 0x94D049BB133111EB;
  x ^= x >> 31.
- ``derive(seed, a, b, …)``: h = mix(seed + G); then for each number: h = mix((h ^ number) + G).
- ``word(key, k)``: mix(key + (k + 1) * G), the k-th output of splitmix64 started at `key`.

**feistel-1**, with key = derive(seed, epoch):

- length ≤ 4096: Fisher-Yates. Start from 0 … length - 1; for i from length - 1 down to 1, with k counting from 0, swap
  the elements i and j = (word(key, k) * (i + 1)) >> 64 (the product in 128 bits). A Feistel network over so few values
  would not reach all permutations alike; a table of 4096 entries is still constant memory.
- length > 4096: a Feistel network of 8 rounds over pairs (left, right) of numbers below a = ceil(sqrt(length)), which
  stand for left * a + right. Round r: (left, right) becomes (right, (left + f) mod a), where
  x = mix(right + word(key, r)) and f = ((x >> 32) * a) >> 32, a number below a (a is below 2**32, so the product fits).
  A result at or above length is put through the network again, until it is below (cycle walking). As a * a exceeds
  length by less than 2 * a, at most 2 / sqrt(length) of the values walk.

**sequential-1**: the index is the position.

Source: J. Black and P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002 (the Feistel network over
Z_a x Z_b and cycle walking). S. Vigna, splitmix64.c, https://prng.di.unimi.it/splitmix64.c.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass, field

import numpy

from safepoint.errors import RequestError

SHUFFLED = "feistel-1"
SEQUENTIAL = "sequential-1"
KNOWN_ORDERS = frozenset({SHUFFLED, SEQUENTIAL})

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST_FACTOR = 0xBF58476D1CE4E5B9
_SECOND_FACTOR = 0x94D049BB133111EB
_ROUNDS = 8
_LONGEST_TABLE = 4096
_LONGEST = (1 << 63) - 1
# Below this size the fixed cost of numpy's calls exceeds the cost of the scalar form.
_SMALLEST_VECTOR = 16


@dataclass(frozen=True, slots=True)
class GlobalOrder:
    """Give the sample index at each position of one epoch, in constant memory.

    Args:
        length: Number of samples, from 1 to 2**63 - 1.
        seed: From 0 to 2**64 - 1.
        epoch: Counted from 0; each epoch has its own permutation.
        shuffle: False gives the sequential order.

    Raises:
        RequestError: A number is outside its range.
    """

    length: int
    seed: int = field(kw_only=True)
    epoch: int = field(default=0, kw_only=True)
    shuffle: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        check_number("length", self.length, 1, _LONGEST)
        check_number("seed", self.seed, 0, _MASK)
        check_number("epoch", self.epoch, 0, _LONGEST)

    @property
    def version(self) -> str:
        """Return the name of the algorithm, which a saved state records."""
        return order_version(shuffle=self.shuffle)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, position: int) -> int:
        position = operator.index(position)
        if not 0 <= position < self.length:
            # Not one of our own errors: Python's sequence protocol ends an iteration on this one.
            raise IndexError(f"position {position} is outside an order of {self.length} samples")
        if not self.shuffle:
            return position
        key = derive(self.seed, self.epoch)
        if self.length <= _LONGEST_TABLE:
            return _table(self.length, key)[position]
        return _walk(position, self.length, _side(self.length), _round_keys(key))

    def block(self, start: int, stop: int) -> list[int]:
        """Return the indices at the positions from `start` up to, not including, `stop`.

        Equal to ``[order[i] for i in range(start, stop)]``, and faster.

        Raises:
            RequestError: The range is not within the order.
        """
        if not 0 <= start <= stop <= self.length:
            raise RequestError(
                "a block of positions is outside the order",
                expected=f"0 <= start <= stop <= {self.length}",
                found=f"start {start}, stop {stop}",
            )
        if not self.shuffle:
            return list(range(start, stop))
        key = derive(self.seed, self.epoch)
        if self.length <= _LONGEST_TABLE:
            return list(_table(self.length, key)[start:stop])
        side, round_keys = _side(self.length), _round_keys(key)
        if stop - start < _SMALLEST_VECTOR:
            return [_walk(position, self.length, side, round_keys) for position in range(start, stop)]
        return _walk_all(start, stop, self.length, side, round_keys)


def order_version(*, shuffle: bool) -> str:
    """Return the name of the algorithm that gives the shuffled or the sequential order."""
    return SHUFFLED if shuffle else SEQUENTIAL


def share_of_batch(start: int, stop: int, *, rank: int, world_size: int) -> range:
    """Return the positions that one rank takes from the global batch at the positions [start, stop).

    The parts are contiguous, in rank order, without gap or overlap, and differ in size by at most one: put together
    they are the batch in its global order, for every world size. A batch of fewer samples than ranks leaves some part
    empty.
    """
    size = stop - start
    return range(start + size * rank // world_size, start + size * (rank + 1) // world_size)


def derive(seed: int, *numbers: int) -> int:
    """Return 64 bits that depend on every argument and on their order; see the head of this file."""
    state = _mix((seed + _GOLDEN) & _MASK)
    for number in numbers:
        state = _mix(((state ^ number) + _GOLDEN) & _MASK)
    return state


def check_number(name: str, value: object, least: int, most: int) -> None:
    """Raise `RequestError` unless `value` is an int, and no bool, within [least, most]."""
    if type(value) is not int or not least <= value <= most:
        raise RequestError(
            f"{name} is not a number that can be used",
            where=name,
            expected=f"an int from {least} to {most}",
            found=f"{type(value).__name__} {value!r}",
        )


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * _FIRST_FACTOR) & _MASK
    x = ((x ^ (x >> 27)) * _SECOND_FACTOR) & _MASK
    return x ^ (x >> 31)


def _word(key: int, k: int) -> int:
    return _mix((key + (k + 1) * _GOLDEN) & _MASK)


def _round_keys(key: int) -> tuple[int, ...]:
    return tuple(_word(key, r) for r in range(_ROUNDS))


def _side(length: int) -> int:
    return math.isqrt(length - 1) + 1


# A memo of a pure function, and bounded: a table costs milliseconds, and each batch asks for it again.
@functools.lru_cache(maxsize=8)
def _table(length: int, key: int) -> tuple[int, ...]:
    indices = list(range(length))
    for k, i in enumerate(range(length - 1, 0, -1)):
        j = (_word(key, k) * (i + 1)) >> 64
        indices[i], indices[j] = indices[j], indices[i]
    return tuple(indices)


def _walk(position: int, length: int, side: int, round_keys: tuple[int, ...]) -> int:
    value = position
    while True:
        left, right = divmod(value, side)
        for round_key in round_keys:
            left, right = right, (left + ((_mix((right + round_key) & _MASK) >> 32) * side >> 32)) % side
        value = left * side + right
        if value < length:
            return value


def _walk_all(start: int, stop: int, length: int, side: int, round_keys: tuple[int, ...]) -> list[int]:
    values = numpy.arange(start, stop, dtype=numpy.uint64)
    a = numpy.uint64(side)
    keys = [numpy.uint64(round_key) for round_key in round_keys]
    first, second = numpy.uint64(_FIRST_FACTOR), numpy.uint64(_SECOND_FACTOR)
    by_27, by_30, by_31, by_32 = (numpy.uint64(bits) for bits in (27, 30, 31, 32))
    walking = numpy.arange(stop - start)
    while walking.size:
        left, right = numpy.divmod(values[walking], a)
        for key in keys:
            x = right + key
            x = (x ^ (x >> by_30)) * first
            x = (x ^ (x >> by_27)) * second
            x ^= x >> by_31
            total = left + (((x >> by_32) * a) >> by_32)
            # The remainder of a sum below 2 * a: where the sum is below a, the difference wraps to a huge number.
            left, right = right, numpy.minimum(total, total - a)
        values[walking] = left * a + right
        walking = walking[values[walking] >= numpy.uint64(length)]
    return [int(value) for value in values.tolist()]
