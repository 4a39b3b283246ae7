"""A device that does its work at the worst moment, to find out who waits for it and who does not.

Its streams are queues. One kind of them, those of the training or the one beside them, does at once what it is given;
the other does nothing until it is waited for. So whoever forgets to wait reads or overwrites the wrong bytes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from safepoint.state.far import Far
from safepoint.state.item import Held
from safepoint.state.streams import Streams
from safepoint.state.tensors import TensorSource

Work = Callable[[], object]


class Queue:
    """One stream: what it was given, and how much of that is done."""

    def __init__(self) -> None:
        self.given: list[Work] = []
        self.done = 0

    def run(self, stop: int | None = None) -> None:
        """Do what was given up to a place; nothing if that is done."""
        stop = len(self.given) if stop is None else stop
        while self.done < stop:
            work = self.given[self.done]
            # First: what is waited for may be waiting for what comes before.
            self.done += 1
            work()


class Device:
    """A device with a stream for each thread of the training, and one beside them.

    Args:
        eager: Who does its work at once: ``training`` or ``side``.
    """

    def __init__(self, eager: str) -> None:
        self.eager = eager
        self.side = Queue()
        self.streams: dict[int, Queue] = {}
        self.pinned: list[str] = []
        self.lock = threading.RLock()

    @property
    def current(self) -> Queue:
        """Return this thread's stream of the training."""
        return self.streams.setdefault(threading.get_ident(), Queue())

    def train(self, work: Work) -> None:
        """Give the device work of the training."""
        self.put(self.current, work)

    def put(self, queue: Queue, work: Work) -> None:
        with self.lock:
            queue.given.append(work)
            if (queue is self.side) == (self.eager == "side"):
                queue.run()

    def synchronize(self) -> None:
        """Do all work."""
        with self.lock:
            for queue in (*self.streams.values(), self.side):
                queue.run()


class Side:
    """The device as `safepoint.state.streams` sees it."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def follow(self) -> None:
        ahead = self.device.current
        stop = len(ahead.given)
        self.device.put(self.device.side, lambda: ahead.run(stop))

    def give(self, work: Work) -> None:
        self.device.put(self.device.side, work)

    def mark(self) -> Mark:
        return Mark(self.device, len(self.device.side.given))

    def pin(self, memory: memoryview) -> Work:
        size_bytes, alive = len(memory), weakref.ref(memory.obj)
        self.device.pinned.append(f"pin {size_bytes}")
        return lambda: self.device.pinned.append(f"unpin {size_bytes}" if alive() is not None else "too late")


class Mark:
    def __init__(self, device: Device, stop: int) -> None:
        self.device, self.stop = device, stop

    def hold_back(self) -> None:
        self.device.put(self.device.current, lambda: self.device.side.run(self.stop))

    def wait(self) -> None:
        with self.device.lock:
            self.device.side.run(self.stop)


def far_type(device: Device) -> type[TensorSource]:
    """Return a type of sources whose tensors lie on a device; their bytes go by no other way."""

    class OnDevice(TensorSource, frozen=True):
        def copy_into(self, buffer: memoryview) -> None:
            raise AssertionError("a tensor of a device was copied past its streams")

        def in_place(self) -> memoryview | None:
            return None

        @staticmethod
        def addresses(sources: Sequence[Any]) -> list[int]:
            return [0] * len(sources)

        @staticmethod
        def hold(sources: Sequence[Any]) -> list[Held | None]:
            return [None] * len(sources)

        @staticmethod
        def far(sources: Sequence[Any], kept: dict[Any, Any]) -> Far | None:
            return Far(tuple(range(len(sources))), Streams({torch.device("cpu"): Side(device)}))

    return OnDevice
