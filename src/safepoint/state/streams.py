"""Streams: copies between an accelerator and host memory, on a stream beside those of the training.

1. A stream of ours follows what the training had given its device by the boundary, and then waits for nothing of it.
   So copies run beside the next forward and backward pass; what must not overtake them is held back on the device.
2. Live memory is kept by references until the host has seen that it was read: the allocator of a device gives memory
   that is let go to the next kernel of the training, which does not wait for a stream of ours.
3. What an accelerator offers no streams, or no way to pin memory of ours, is not carried: it is copied as before, each
   tensor with a blocking copy. So are all but CUDA and its like.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from safepoint.state.far import Carrier, Comparison, Far, Trip
from safepoint.state.item import Held
from safepoint.state.memory import as_bytes, is_dense

# Boxes that follow each other in a file are joined on the device up to here, and copied at once.
_JOINED_BYTES = 4 << 20
# What is compared at a time takes as much memory of the device twice.
_COMPARED_BYTES = 8 << 20
# Of cudaHostRegister: memory is pinned for all devices of the process.
_PORTABLE = 1

# The place of some bytes in host memory, their number, and what gives them on the device, in parts.
_Piece = tuple[int, int, Callable[[], list[torch.Tensor]]]


class Mark(Protocol):
    """A place in a stream of ours; it is passed when all is done that the stream was given before it."""

    def hold_back(self) -> None:
        """Have what this thread gives the device from here on wait until it is passed; return at once."""

    def wait(self) -> None:
        """Return when it is passed."""


class Side(Protocol):
    """A device as a stream of ours sees it, beside the streams of the training."""

    def follow(self) -> None:
        """Have our stream wait for all that this thread has given the device."""

    def give(self, work: Callable[[], object]) -> None:
        """Call `work`, and put what it gives the device into our stream."""

    def mark(self) -> Mark:
        """Return a mark behind all that our stream was given."""

    def pin(self, memory: memoryview) -> Callable[[], object]:
        """Let the device reach host memory by itself, if it can; return what ends that."""


def far_of(sources: Sequence[Any], kept: dict[Any, Any]) -> Far | None:
    """Return which sources of live tensors lie on devices with streams; see `safepoint.state.far.far_among`."""
    devices = [source.tensor.device for source in sources]
    sides: dict[torch.device, Side] = {}
    for device in filter(has_streams, set(devices)):
        # An allocator keeps what was let go in a stream for that stream.
        sides[device] = kept[device] if device in kept else kept.setdefault(device, DeviceSide(device))
    numbers = tuple(number for number, device in enumerate(devices) if device in sides)
    return Far(numbers, Streams(sides)) if numbers else None


def carrier_to(targets: Sequence[Any]) -> Carrier:
    """Return what brings bytes to targets with a `landing`, each on a device with streams."""
    return Streams({one: DeviceSide(one) for one in {target.landing.device for target in targets}})


def has_streams(device: torch.device) -> bool:
    """Return whether a device has streams and events, and memory of ours can be pinned for it."""
    module = getattr(torch, device.type, None)
    return device.type != "cpu" and all(hasattr(module, name) for name in ("Stream", "Event", "stream", "cudart"))


class Streams:
    """Be a `Carrier` for sources that hold a live `tensor`.

    Args:
        sides: A side of each device that any of them lies on; they are made to follow.
    """

    def __init__(self, sides: Mapping[torch.device, Side]) -> None:
        self._sides = sides
        self.follow()

    def follow(self) -> None:
        """Let what is asked for from here on come after all that this thread has given the devices."""
        for side in self._sides.values():
            side.follow()

    def hold(self, sources: Sequence[Any]) -> list[Held | None]:
        """Return where the bytes of each lie, and keep them there; None for a tensor that is not dense in C order."""
        found: list[Held | None] = []
        for tensor in (source.tensor for source in sources):
            locate = tensor.untyped_storage().data_ptr if is_dense(tensor) else None
            found.append(Held(tensor.data_ptr(), locate(), locate) if locate else None)
        return found

    def fetch(self, sources: Sequence[Any], memory: memoryview, begins: Sequence[int]) -> Trip:
        """Bring the bytes of each to its place in host memory."""
        pieces: list[_Piece] = [
            (begin, source.nbytes, partial(_whole, source.tensor.detach()))
            for source, begin in zip(sources, begins, strict=True)
        ]
        return self._fetched(sources, memory, pieces)

    def sample(
        self, sources: Sequence[Any], places: Sequence[Sequence[int]], size_bytes: int, memory: memoryview
    ) -> Trip:
        """Bring some bytes of each to host memory, one after the other."""
        pieces: list[_Piece] = []
        end = 0
        for source, own in zip(sources, places, strict=True):
            pieces.append((end, len(own) * size_bytes, partial(_some, source.tensor.detach(), own, size_bytes)))
            end += pieces[-1][1]
        return self._fetched(sources, memory, pieces)

    def compare(self, sources: Sequence[Any], memory: memoryview, begins: Sequence[int]) -> Comparison:
        """Compare the bytes of each with those at its place in host memory."""
        return _Compared(self._sides, sources, memory, begins)

    def put(self, targets: Sequence[Any], begins: Sequence[int], parts: Sequence[memoryview]) -> Trip:
        """Bring host memory to its places in the landings of targets."""
        landings = [target.landing for target in targets]
        devices = _by_device(landings)
        for device, own in devices.items():
            self._sides[device].give(
                partial(_copy_in, [(landings[number], begins[number], parts[number]) for number in own])
            )
        return _Trip([self._sides[device].mark() for device in devices], [_kept(landings), parts])

    def pin(self, memory: memoryview) -> Callable[[], object]:
        """Let the devices reach host memory by themselves; pinned for one, it is for all."""
        return next(iter(self._sides.values())).pin(memory)

    def wait(self) -> None:
        """Return when nothing is under way any more."""
        for side in self._sides.values():
            side.mark().wait()

    def _fetched(self, sources: Sequence[Any], memory: memoryview, pieces: Sequence[_Piece]) -> Trip:
        # There is no tensor of no memory.
        host = torch.frombuffer(memory if len(memory) else bytearray(1), dtype=torch.uint8)
        tensors = [source.tensor for source in sources]
        numbers = _by_device(tensors)
        for device, own in numbers.items():
            filled = [pieces[number] for number in own if pieces[number][1]]
            self._sides[device].give(partial(_copy_out, filled, host))
        return _Trip([self._sides[device].mark() for device in numbers], _kept(tensors))


class _Trip:
    """Follow what streams were given, and keep what it needs."""

    def __init__(self, marks: Sequence[Mark], kept: Sequence[object]) -> None:
        self._marks = marks
        self._kept = kept

    def hold_back(self) -> None:
        for mark in self._marks:
            mark.hold_back()

    def wait(self) -> None:
        for mark in self._marks:
            mark.wait()
        self._kept = ()


class _Compared:
    """Follow a comparison of far memory with host memory."""

    def __init__(
        self, sides: Mapping[torch.device, Side], sources: Sequence[Any], memory: memoryview, begins: Sequence[int]
    ) -> None:
        host = torch.frombuffer(memory, dtype=torch.uint8)
        tensors = [source.tensor for source in sources]
        self._numbers = _by_device(tensors)
        self._flags: list[torch.Tensor | None] = [None] * len(sources)
        for device, own in self._numbers.items():
            for number in own:
                begin = begins[number]
                theirs = host[begin : begin + sources[number].nbytes]
                sides[device].give(partial(self._compare, number, tensors[number].detach(), theirs))
        self._trip = _Trip([sides[device].mark() for device in self._numbers], _kept(tensors))

    def hold_back(self) -> None:
        self._trip.hold_back()

    def wait(self) -> None:
        self._trip.wait()

    def found(self) -> list[bool | None]:
        self.wait()
        found: list[bool | None] = [None] * len(self._flags)
        for own in self._numbers.values():
            flags = {number: flag for number in own if (flag := self._flags[number]) is not None}
            if flags:
                differ = torch.stack(list(flags.values())).tolist()
                for number, differs in zip(flags, differ, strict=True):
                    found[number] = not differs
        return found

    def _compare(self, number: int, tensor: torch.Tensor, theirs: torch.Tensor) -> None:
        """Note whether any byte differs; a device that has no room leaves it open."""
        try:
            ours = as_bytes(tensor)
            differs = torch.zeros((), dtype=torch.bool, device=tensor.device)
            for begin in range(0, len(ours), _COMPARED_BYTES):
                part = theirs[begin : begin + _COMPARED_BYTES].to(tensor.device, non_blocking=True)
                differs |= (ours[begin : begin + _COMPARED_BYTES] != part).any()
        except torch.OutOfMemoryError:
            return
        self._flags[number] = differs


class DeviceSide:
    """A stream of ours on a device of a kind that has streams, by the module of that kind, such as `torch.cuda`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._stream: Any = self._module.Stream(device)

    def follow(self) -> None:
        """Have our stream wait for the one that is current in this thread."""
        self._stream.wait_stream(self._module.current_stream(self._device))

    def give(self, work: Callable[[], object]) -> None:
        """Call `work` with our stream as the current one."""
        # The device besides: the stream's block alone, in a thread of ours, would end with a switch to device 0, and a
        # process that uses another one would begin to use that too.
        with self._module.device(self._device), self._module.stream(self._stream):
            work()

    def mark(self) -> Mark:
        """Return an event behind all that our stream was given."""
        # One that blocks: the processor is not kept busy by waiting for it.
        event = self._module.Event(blocking=True)
        event.record(self._stream)
        return _EventMark(self._module, self._device, event)

    def pin(self, memory: memoryview) -> Callable[[], object]:
        """Register host memory with the device's driver; where that refuses, copies take the slower way."""
        address, size_bytes = torch.frombuffer(memory, dtype=torch.uint8).data_ptr(), len(memory)
        registered: list[bool] = []

        def register() -> None:
            with contextlib.suppress(RuntimeError), self._module.device(self._device):
                registered.append(int(self._module.cudart().cudaHostRegister(address, size_bytes, _PORTABLE)) == 0)

        # The driver keeps a refusal for the thread that met it, and would tell it again as that of the next kernel.
        thread = threading.Thread(target=register, name="safepoint-pin", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # At a limit of the system nothing is pinned.
            return _nothing
        thread.join()
        return partial(_unpin, self._module, self._device, address) if any(registered) else _nothing


class _EventMark:
    """An event in a stream of ours."""

    def __init__(self, module: Any, device: torch.device, event: Any) -> None:
        self._module, self._device, self._event = module, device, event

    def hold_back(self) -> None:
        self._module.current_stream(self._device).wait_event(self._event)

    def wait(self) -> None:
        self._event.synchronize()


def _unpin(module: Any, device: torch.device, address: int) -> None:
    """Take registered memory back, once nothing is on its way to it."""
    # A child that was forked off cannot ask the driver, and has nothing to take back.
    with contextlib.suppress(RuntimeError):
        module.synchronize(device)
        module.cudart().cudaHostUnregister(address)


def _nothing() -> None:
    """End what was not begun."""


def _by_device(tensors: Sequence[torch.Tensor]) -> dict[torch.device, list[int]]:
    """Return the numbers of the tensors that lie on each device, in their order."""
    found: dict[torch.device, list[int]] = {}
    for number, tensor in enumerate(tensors):
        found.setdefault(tensor.device, []).append(number)
    return found


def _kept(tensors: Sequence[torch.Tensor]) -> list[object]:
    # Not the tensors, because a parameter may be given other memory, by `data =`.
    return [tensor.untyped_storage() for tensor in tensors]


def _copy_in(parts: Sequence[tuple[torch.Tensor, int, memoryview]]) -> None:
    """Give the current stream what brings host memory to its places in tensors."""
    for tensor, begin, part in parts:
        bytes_of_part = torch.frombuffer(part, dtype=torch.uint8)
        as_bytes(tensor)[begin : begin + len(part)].copy_(bytes_of_part, non_blocking=True)


def _copy_out(pieces: Sequence[_Piece], host: torch.Tensor) -> None:
    """Give the current stream what brings pieces to their places in host memory."""
    for run in _runs(pieces):
        begin, end = run[0][0], run[-1][0] + run[-1][1]
        try:
            parts = [part for _, _, make in run for part in make()]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        except torch.OutOfMemoryError:
            if len(run) == 1:
                raise
            # Joined, they take memory of the device once more.
            for piece in run:
                _copy_out([piece], host)
            continue
        host[begin:end].copy_(whole, non_blocking=True)


def _runs(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Yield pieces that follow each other in host memory and are small together, or a single one of any size."""
    run: list[_Piece] = []
    for piece in pieces:
        begin, size, _ = piece
        follows = run and begin == run[-1][0] + run[-1][1]
        if follows and begin + size - run[0][0] <= _JOINED_BYTES:
            run.append(piece)
            continue
        if run:
            yield run
        run = [piece]
    if run:
        yield run


def _whole(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [as_bytes(tensor.resolve_conj().resolve_neg().contiguous())]


def _some(tensor: torch.Tensor, places: Sequence[int], size_bytes: int) -> list[torch.Tensor]:
    """Return bytes of a dense tensor from several places, all but the last one at equal distances."""
    data, last = as_bytes(tensor), places[-1]
    found = [data[last : last + size_bytes]]
    if len(places) > 1:
        distance = places[1] - places[0] if len(places) > 2 else 1
        rows = data.as_strided((len(places) - 1, size_bytes), (distance, 1), data.storage_offset() + places[0])
        found.insert(0, rows.reshape(-1))
    return found
