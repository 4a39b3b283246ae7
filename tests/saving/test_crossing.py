"""Copies from an accelerator: nothing is read before it is there, and nothing overtakes what is still to be read.

The device does its work at the worst moment, so a missing wait gives wrong bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from safepoint.behind import Behind
from safepoint.errors import TornSnapshotError
from safepoint.saving import crossing
from safepoint.saving.copying import Habits
from safepoint.saving.crossing import Crossing
from safepoint.saving.form import FileForm, form_of
from safepoint.saving.layout import LayoutBox
from safepoint.saving.stage import StagingBuffer
from safepoint.state import streams
from safepoint.state.far import far_among
from safepoint.state.item import Owned, Source
from safepoint.state.tensors import TensorSource
from tests.saving.devices import Device, far_type

COUNT = 3000
NAMES = ("buffer", "near", "small", "weight")


@pytest.fixture(autouse=True)
def small_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossing, "_STRETCH_BYTES", 4096)
    monkeypatch.setattr(streams, "_COMPARED_BYTES", 4096)


@pytest.fixture(params=["training", "side"])
def device(request: pytest.FixtureRequest) -> Device:
    return Device(request.param)


class Case:
    """A model of which one tensor lies in host memory, and an optimizer that owns a weight on the device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.tensors = {name: torch.zeros(COUNT) for name in NAMES}
        self.tensors["small"] = torch.zeros(3)
        boxes = [
            LayoutBox("model", name, "float32", tuple(one.shape), (0,), tuple(one.shape))
            for name, one in self.tensors.items()
        ]
        self.form: FileForm = form_of(boxes, is_alone=True)
        self.habits, self.buffer = Habits(), StagingBuffer()

    def update(self, value: float) -> None:
        """Have the device change all its tensors, behind what it was given before."""
        for name, tensor in self.tensors.items():
            if name == "near":
                tensor.data.fill_(value)
            else:
                self.device.train(lambda tensor=tensor: tensor.data.fill_(value))

    def begin(
        self, *, owned_names: Sequence[str] = ("weight",), meanwhile: Callable[[], object] = lambda: None
    ) -> Crossing:
        """Return a copy that has left its boundary."""
        kind = far_type(self.device)
        sources: list[Source] = [
            (TensorSource if name == "near" else kind).of(one, name) for name, one in self.tensors.items()
        ]
        ranges = sorted(
            (one.data_ptr(), one.data_ptr() + one.nbytes) for one in (self.tensors[name] for name in owned_names)
        )
        owned = Owned(begins=tuple(begin for begin, _ in ranges), ends=tuple(end for _, end in ranges))
        far = far_among(sources, {})
        assert far is not None
        assert far.numbers == (0, 2, 3)
        self.image = self.buffer.view(self.form.size_bytes, far.carrier)
        meanwhile()
        made = Crossing(self.form, sources, self.image, owned=owned, habits=self.habits, turn=self.buffer.turn, far=far)
        made.leave_boundary()
        return made

    def known(self, *, value: float = 1.0) -> Crossing:
        """Return a copy of this value whose weight comes behind the training."""
        self.update(value - 1)
        made = self.begin()
        made.settle()
        made.advance(self.form.size_bytes)
        made.leave_image()
        assert set(self.habits.lies_still.values()) == {True}
        self.update(value)
        return self.begin()

    def stored(self) -> dict[str, set[float]]:
        """Return the values in the image of each tensor."""
        found = {}
        for entry in self.form.entries:
            part = self.image[entry.offset_bytes : entry.offset_bytes + entry.size_bytes]
            found[entry.box.name] = set(torch.frombuffer(bytearray(part), dtype=torch.float32).tolist())
        return found

    def key(self) -> tuple[str, str, tuple[int, ...]]:
        return ("model", "weight", (0,))


def everywhere(value: float) -> dict[str, set[float]]:
    return {name: {value} for name in NAMES}


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_a_first_copy_has_the_values_of_the_update_before_it(device: Device) -> None:
    """The update may still be under way when the boundary is reached."""
    case = Case(device)
    case.update(7.0)
    made = case.begin()
    # Nothing is owned that was seen to lie still: all of it is there when the boundary is left.
    case.update(8.0)
    made.advance(case.form.size_bytes)
    assert case.stored() == everywhere(7.0)


def test_a_step_does_not_overtake_the_copy_behind_it(device: Device) -> None:
    case = Case(device)
    made = case.known()
    assert not made.is_complete
    made.settle()
    case.update(2.0)
    device.current.run()
    made.advance(case.form.size_bytes)
    assert case.stored() == everywhere(1.0)


def test_a_step_of_another_thread_does_not_overtake_it_either(device: Device) -> None:
    """Each thread has a stream of its own, and only one of them comes first."""
    case = Case(device)
    made = case.known()
    device.eager = ""
    made.settle()

    def step() -> None:
        made.settle()
        case.update(2.0)
        device.current.run()

    assert made.is_wanted
    in_thread(step)
    made.advance(case.form.size_bytes)
    assert case.stored() == everywhere(1.0)


def test_what_is_digested_has_arrived(device: Device) -> None:
    """Up to the weight without a wait for it, and from there on with one."""
    case = Case(device)
    made = case.known()
    starts = {entry.box.name: entry.offset_bytes for entry in case.form.entries}
    assert max(starts, key=lambda name: starts[name]) == "weight"
    made.advance(starts["weight"])
    assert not made.is_complete
    made.advance(starts["weight"] + 1)
    assert case.stored() == everywhere(1.0)
    assert made.is_complete


def test_the_end_of_the_copy_is_told_once_all_has_arrived(device: Device) -> None:
    case = Case(device)
    made, told = case.known(), []
    made.when_complete(lambda: told.append(case.stored()))
    assert told == []
    made.advance(case.form.size_bytes)
    assert told == [everywhere(1.0)]
    made.when_complete(lambda: told.append(case.stored()))
    assert len(told) == 2


def test_the_image_is_left_with_nothing_on_its_way_to_it(device: Device) -> None:
    """The next save writes into it."""
    case = Case(device)
    made = case.known()
    made.end()
    made.leave_image()
    case.image[:] = bytes(len(case.image))
    device.synchronize()
    assert not any(case.image)


def test_the_image_is_left_with_nothing_compared_to_it_any_more(device: Device) -> None:
    """Else the next save's bytes would be what a weight is compared with."""
    case = Case(device)
    case.update(1.0)
    made = case.begin()
    made.settle()
    made.advance(case.form.size_bytes)
    assert made.is_wanted
    made.leave_image()
    case.image[:] = bytes(len(case.image))
    assert case.habits.lies_still == {case.key(): True}
    assert not made.is_wanted


def test_a_weight_that_is_edited_before_each_step_is_always_copied_at_the_boundary(device: Device) -> None:
    case = Case(device)
    case.update(1.0)
    made = case.begin()
    device.train(lambda: case.tensors["weight"].data[-1:].add_(1.0))
    made.settle()
    case.update(2.0)
    made.advance(case.form.size_bytes)
    made.leave_image()
    assert case.habits.lies_still == {case.key(): False}
    assert case.begin().is_complete


def test_a_step_does_not_overtake_the_look_at_the_habits(device: Device) -> None:
    case = Case(device)
    case.update(1.0)
    made = case.begin()
    made.settle()
    case.update(2.0)
    device.current.run()
    made.leave_image()
    assert case.habits.lies_still == {case.key(): True}


def test_steps_after_all_has_arrived_give_the_device_nothing(device: Device) -> None:
    """A graph may be captured between two saves, and ends with an error where it waits for anything else."""
    case = Case(device)
    case.known().leave_image()
    made = case.begin(owned_names=NAMES)
    made.settle()
    made.advance(case.form.size_bytes)
    assert made.is_wanted
    given = len(device.current.given), len(device.side.given)
    made.settle()
    assert (len(device.current.given), len(device.side.given)) == given


def test_a_device_without_room_for_a_comparison_leaves_it_open(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*ignored: object, **also: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    case = Case(device)
    case.update(1.0)
    made = case.begin()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", full)
        made.settle()
        device.synchronize()
    made.leave_image()
    assert case.habits.lies_still == {}


def test_boxes_that_cannot_be_joined_for_want_of_room_come_one_by_one(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*ignored: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    case = Case(device)
    case.update(1.0)
    monkeypatch.setattr(torch, "cat", full)
    case.begin()
    assert case.stored() == everywhere(1.0)


def test_a_count_of_writes_that_moves_before_the_step_is_torn(device: Device) -> None:
    case = Case(device)
    made = case.known()
    case.tensors["weight"].add_(1.0)
    made.settle()
    with pytest.raises(TornSnapshotError, match="weight"):
        made.advance(case.form.size_bytes)
    assert case.habits.lies_still == {case.key(): False}


def test_a_count_of_writes_that_moves_while_it_comes_is_torn(device: Device) -> None:
    case = Case(device)
    made = case.known()
    case.tensors["weight"].add_(1.0)
    with pytest.raises(TornSnapshotError, match="weight"):
        made.advance(case.form.size_bytes)


def test_a_count_of_writes_that_moves_at_the_boundary_is_torn_and_leaves_the_image(device: Device) -> None:
    """As a thread beside the loop may do."""
    case = Case(device)
    with pytest.raises(TornSnapshotError, match="buffer"):
        case.begin(meanwhile=lambda: case.tensors["buffer"].add_(1.0))
    case.image[:] = bytes(len(case.image))
    device.synchronize()
    assert not any(case.image)


def test_the_count_of_the_step_itself_is_not_torn(device: Device) -> None:
    """It moves when the step is asked for, long before the device does it."""
    case = Case(device)
    made = case.known()
    made.settle()
    weight = case.tensors["weight"]
    torch.autograd.graph.increment_version(weight)
    case.update(2.0)
    made.advance(case.form.size_bytes)
    assert case.stored() == everywhere(1.0)


def test_bytes_that_differ_from_those_of_the_boundary_are_torn() -> None:
    """Work of the training between the boundary and the step, which no count shows, overtakes the copy."""
    device = Device("training")
    case = Case(device)
    made = case.known()
    device.train(lambda: case.tensors["weight"].data.fill_(5.0))
    made.settle()
    with pytest.raises(TornSnapshotError, match="weight"):
        made.advance(case.form.size_bytes)


def test_memory_that_is_given_back_is_torn(device: Device) -> None:
    case = Case(device)
    made = case.known()
    case.tensors["weight"].untyped_storage().resize_(64 << 20)
    made.settle()
    with pytest.raises(TornSnapshotError, match="weight"):
        made.advance(case.form.size_bytes)


def test_memory_is_kept_until_it_was_read(device: Device) -> None:
    """A weight may be given other memory; its own would be given to the next kernel."""
    case = Case(device)
    made = case.known()
    weight = case.tensors["weight"]
    before = weight.untyped_storage()._weak_ref()
    weight.data = torch.full((COUNT,), 9.0)
    assert not torch.UntypedStorage._expired(before)
    made.settle()
    made.advance(case.form.size_bytes)
    assert case.stored() == everywhere(1.0)
    torch.UntypedStorage._free_weak_ref(before)


def test_a_copy_that_cannot_be_begun_leaves_nothing_on_its_way(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(device)
    case.known().leave_image()

    def fail(self: object, *ignored: object) -> None:
        raise RuntimeError("device")

    monkeypatch.setattr(streams.Streams, "sample", fail)
    with pytest.raises(RuntimeError, match="device"):
        case.begin()
    case.image[:] = bytes(len(case.image))
    device.synchronize()
    assert not any(case.image)


def test_the_training_waits_until_all_has_arrived_and_no_longer(device: Device) -> None:
    """`Behind` asks before each step, of whichever thread."""
    case = Case(device)
    made = case.known()
    behind = Behind(Now(), Now())  # type: ignore[arg-type]  # what it needs of a clock and of costs
    behind.follow(made, object())  # type: ignore[arg-type]  # only handed on
    behind.wait()
    assert behind._followed is not None
    made.advance(case.form.size_bytes)
    behind.wait()
    assert behind._followed is None


class Now:
    """A process and its costs, as far as `Behind` asks."""

    def pid(self) -> int:
        return 1

    def blocked_once_more(self, running: object) -> Now:
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


@pytest.fixture(autouse=True)
def no_thread_is_left(device: Device) -> Iterator[None]:
    yield
    device.synchronize()
