"""Copying many tensors at once: each to its place, from where it was at the boundary, and what is torn by its name."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Sequence

import numpy
import pytest
import torch

from safepoint.errors import InternalError, TornSnapshotError
from safepoint.saving import copying, transfer
from safepoint.saving.copying import Copying, Habits
from safepoint.saving.form import form_of
from safepoint.saving.layout import LayoutBox
from safepoint.saving.live import Live
from safepoint.saving.spans import Spans
from safepoint.saving.transfer import is_same, move_all, read_all
from safepoint.state.item import Owned, Source
from safepoint.state.tensors import TensorSource

MIDDLE = 3000


@pytest.mark.parametrize("tiny_bytes", [0, 1024])
def test_pieces_of_memory_are_copied_each_to_its_place_and_nothing_else(
    chance: random.Random, monkeypatch: pytest.MonkeyPatch, tiny_bytes: int
) -> None:
    monkeypatch.setattr(transfer, "_TINY_BYTES", tiny_bytes)
    sizes = numpy.array([chance.choice([1, 4, 64, 64, 65, 1024, 1500]) for _ in range(300)])
    here = numpy.frombuffer(chance.randbytes(2 * int(sizes.sum())), numpy.uint8).copy()
    there = numpy.zeros(2 * int(sizes.sum()), numpy.uint8)
    order = numpy.array(chance.sample(range(300), 300))
    begins = numpy.zeros(300, numpy.int64)
    begins[order] = numpy.cumsum(2 * sizes[order]) - 2 * sizes[order]
    targets = numpy.cumsum(2 * sizes) - sizes
    move_all(there.ctypes.data + targets, here.ctypes.data + begins, sizes)
    expected = bytearray(there.nbytes)
    for target, begin, size in zip(targets.tolist(), begins.tolist(), sizes.tolist(), strict=True):
        expected[target : target + size] = here[begin : begin + size].tobytes()
    assert there.tobytes() == expected
    assert read_all(here.ctypes.data + begins, 1) == here[begins].tobytes()


@pytest.mark.parametrize("size_bytes", [1, 7, 64 << 10])
def test_memory_is_the_same_only_to_its_last_byte(chance: random.Random, size_bytes: int) -> None:
    one = numpy.frombuffer(chance.randbytes(size_bytes), numpy.uint8).copy()
    other = one.copy()
    assert is_same(one.ctypes.data, other.ctypes.data, size_bytes)
    for place in (0, -1):
        other[:] = one
        other[place] ^= 1
        assert not is_same(one.ctypes.data, other.ctypes.data, size_bytes)


@pytest.mark.parametrize("size_bytes", [0, 1, 64 << 10])
def test_memory_that_may_only_be_read_is_copied(chance: random.Random, size_bytes: int) -> None:
    source, target = chance.randbytes(size_bytes), bytearray(size_bytes)
    transfer.transfer(memoryview(target), memoryview(source))
    assert target == source


def test_places_in_a_file_are_told_in_its_order() -> None:
    spans = Spans([2, 0, 3, 1], numpy.arange(4) * 8, numpy.full(4, 8))
    assert spans.places_of([0, 1, 2]).tolist() == [0, 1, 3]
    assert spans.places_of([]).tolist() == []


def test_boxes_are_grouped_and_a_large_one_is_alone(chance: random.Random) -> None:
    sizes = numpy.array([chance.choice([0, 1, 30, 99, 100, 250]) for _ in range(200)])
    spans = Spans(list(range(200)), numpy.cumsum(sizes) - sizes, sizes)
    chosen = numpy.array(sorted(chance.sample(range(200), 150)))
    batches = [batch.tolist() for batch in spans.batches(chosen, 100)]
    assert sum(batches, []) == chosen.tolist()
    assert all(batch == batch[:1] or (sizes[batch] < 100).all() for batch in batches)
    assert all(sizes[batch].sum() < 200 for batch in batches if len(batch) > 1)
    assert len(batches) < 150


class Case:
    """Tensors of an optimizer, and the image of their file."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        boxes = [
            LayoutBox("optimizer", f"state/{number:05}", "float32", shape, (0,) * len(shape), shape)
            for number, shape in enumerate(tuple(tensor.shape) for tensor in tensors)
        ]
        self.form = form_of(boxes, is_alone=True)
        self.image = memoryview(bytearray(self.form.size_bytes))
        self.habits = Habits()

    def copying(self, sources: Sequence[Source] | None = None) -> Copying:
        found = sources or [TensorSource.of(one, f"{number:05}") for number, one in enumerate(self.tensors)]
        return Copying(self.form, found, self.image, owned=Owned(frozenset({"optimizer"})), habits=self.habits)

    def known(self) -> Copying:
        """Return a copy of which all that is not small is made behind the training."""
        first = self.copying()
        first.leave_boundary()
        first.settle()
        assert set(self.habits.lies_still.values()) <= {True}
        made = self.copying()
        made.leave_boundary()
        return made

    def assert_copied(self, expected: Sequence[torch.Tensor]) -> None:
        for entry in self.form.entries:
            found = bytes(self.image[entry.offset_bytes : entry.offset_bytes + entry.size_bytes])
            assert found == expected[entry.number].contiguous().numpy().tobytes(), entry.box.name


def test_tensors_of_all_sizes_and_kinds_come_to_their_places(chance: random.Random) -> None:
    lengths = [chance.choice([0, 1, 16, 16, 16, 500, MIDDLE, 300_000]) for _ in range(120)]
    tensors = [torch.rand(length) for length in lengths]
    tensors += [torch.rand(9, 7).t(), torch.rand(90, 70).t(), torch.rand(()), torch.rand(5)]
    with torch.inference_mode():
        tensors.append(torch.rand(33))
    case = Case(tensors)
    for _ in range(2):
        case.image[:] = bytes(len(case.image))
        made = case.copying()
        made.leave_boundary()
        made.settle()
        case.assert_copied(tensors)
        assert bytes(case.image[: len(case.form.header)]) == case.form.header


def test_small_tensors_are_copied_at_the_boundary_and_the_others_behind_it() -> None:
    case = Case([torch.ones(16), torch.ones(MIDDLE), torch.ones(4)])
    made = case.known()
    case.tensors[0].data.zero_()
    assert not made.is_complete
    made.settle()
    case.assert_copied([torch.ones(16), torch.ones(MIDDLE), torch.ones(4)])


def write(tensor: torch.Tensor) -> None:
    tensor.add_(1)


def write_past(tensor: torch.Tensor) -> None:
    tensor.data.add_(1)


def resize(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(2 * tensor.nbytes)


@pytest.mark.parametrize("change", [write, write_past, resize])
@pytest.mark.parametrize("place", [0, 1, 6])
def test_of_many_that_are_copied_together_the_torn_one_is_named_and_copied_at_the_boundary_from_then_on(
    change: Callable[[torch.Tensor], None], place: int
) -> None:
    case = Case([torch.ones(MIDDLE) for _ in range(7)])
    made = case.known()
    change(case.tensors[place])
    with pytest.raises(TornSnapshotError, match=f"{place:05}"):
        made.advance(len(case.image))
    lies_still = [case.habits.lies_still["optimizer", f"state/{number:05}", (0,)] for number in range(7)]
    assert lies_still == [number != place for number in range(7)]


@pytest.mark.parametrize("place", [0, 2])
def test_of_several_that_are_looked_at_alone_the_torn_one_is_named(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    monkeypatch.setattr(copying, "_PART_BYTES", 4 * MIDDLE)
    case = Case([torch.ones(MIDDLE) for _ in range(3)])
    made = case.known()
    write_past(case.tensors[place])
    with pytest.raises(TornSnapshotError, match=f"{place:05}"):
        made.advance(len(case.image))


def test_nothing_is_kept_of_what_was_copied() -> None:
    case = Case([torch.ones(16), torch.ones(MIDDLE)])
    made = case.copying([TensorSource.of(one, "") for one in case.tensors])
    kept = [weakref.ref(source.tensor) for source in made._live.sources]  # type: ignore[attr-defined]  # of tensors
    memory = weakref.ref(case.tensors[1].untyped_storage())
    case.tensors = []
    made.leave_boundary()
    made.settle()
    assert [one() for one in kept] == [None, None]
    assert memory() is None


def test_memory_of_one_of_many_that_was_given_back_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([torch.ones(MIDDLE) for _ in range(7)])
    made = case.known()
    resize(case.tensors[3])
    read: list[object] = []
    monkeypatch.setattr("safepoint.saving.live.move_all", lambda *of: read.append(of))
    with pytest.raises(TornSnapshotError, match="resized"):
        made.advance(len(case.image))
    assert read == []


def test_a_tensor_that_is_given_other_memory_is_copied_as_it_was() -> None:
    case = Case([torch.ones(MIDDLE) for _ in range(7)])
    made = case.known()
    for tensor in case.tensors:
        tensor.data = torch.zeros(MIDDLE)
    made.advance(len(case.image))
    case.assert_copied([torch.ones(MIDDLE)] * 7)


def test_a_small_tensor_that_was_written_to_before_its_copy_is_torn() -> None:
    case = Case([torch.ones(16) for _ in range(20)])
    made = case.copying()
    write(case.tensors[7])
    with pytest.raises(TornSnapshotError, match="00007"):
        made.leave_boundary()


def test_a_write_through_what_counts_for_a_tensor_is_seen() -> None:
    """As through a distributed tensor, whose local memory does not count it."""
    case = Case([torch.ones(16) for _ in range(3)])
    counters = [torch.ones(1) for _ in case.tensors]
    sources = [
        TensorSource.of(one, f"{number:05}", counter=counter)
        for number, (one, counter) in enumerate(zip(case.tensors, counters, strict=True))
    ]
    made = case.copying(sources)
    write(counters[1])
    with pytest.raises(TornSnapshotError, match="00001"):
        made.leave_boundary()


@pytest.mark.parametrize("length", [16, MIDDLE])
def test_a_tensor_of_another_size_than_its_box_is_refused(length: int) -> None:
    case = Case([torch.ones(length)])
    with pytest.raises(InternalError, match="other bytes"):
        case.copying([TensorSource(torch.ones(length - 1))]).leave_boundary()


def test_the_sample_of_a_tensor_is_taken_elsewhere_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that one sample misses, another one meets."""
    case = Case([torch.ones(MIDDLE)])
    case.known()
    seen: set[int] = set()
    monkeypatch.setattr(
        "safepoint.saving.live.read_all", lambda places, size: seen.update(places.tolist()) or b"" * size
    )
    for turn in range(50):
        sources = [TensorSource.of(case.tensors[0], "w")]
        owned = Owned(frozenset({"optimizer"}))
        Copying(case.form, sources, case.image, owned=owned, habits=case.habits, turn=turn)
    places = [address - case.tensors[0].data_ptr() for address in seen]
    assert len(places) == 50
    assert min(places) >= 0 and max(places) <= case.tensors[0].nbytes - copying.SAMPLE_BYTES


def test_memory_in_which_a_box_has_no_place_is_not_written_to() -> None:
    case = Case([torch.ones(16), torch.ones(16)])
    live = Live(case.form, [TensorSource.of(one, "") for one in case.tensors])
    header = len(case.form.header)
    for begin, end in ((header + 1, len(case.image)), (header, len(case.image) - 1)):
        with pytest.raises(InternalError, match="beyond"):
            live.bring(numpy.arange(2), case.image[begin:end], begin)
    assert not any(case.image)
