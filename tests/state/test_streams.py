"""What a device is asked, by the names that torch's modules of devices have: recorded, for no device is at hand."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from safepoint.state.streams import DeviceSide, far_of, has_streams

DEVICE = torch.device("cuda", 3)


class Module:
    """A module like `torch.cuda`, which notes what it is asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.streams = 0
        self.threads: set[int] = set()
        self.answer = 0

    def Stream(self, device: torch.device) -> Any:
        self.streams += 1
        return SimpleNamespace(wait_stream=lambda other: self.calls.append(f"ours waits for {other.name}"))

    def Event(self, *, blocking: bool) -> Any:
        assert blocking
        return SimpleNamespace(
            record=lambda stream: self.calls.append("record"), synchronize=lambda: self.calls.append("the host waits")
        )

    def current_stream(self, device: torch.device) -> Any:
        assert device == DEVICE
        return SimpleNamespace(name="the training's", wait_event=lambda event: self.calls.append("the training waits"))

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        assert device == DEVICE
        self.calls.append("to the device")
        yield
        self.calls.append("back from the device")

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.calls.append("to our stream")
        yield
        self.calls.append("back from our stream")

    def synchronize(self, device: torch.device) -> None:
        self.calls.append("synchronize")

    def cudart(self) -> Any:
        return self

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        self.threads.add(threading.get_ident())
        self.calls.append(f"register {size_bytes} with {flags}")
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append("unregister")
        return 0


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    made = Module()
    monkeypatch.setattr(torch, "get_device_module", lambda device: made)
    return made


def test_torch_has_all_that_a_device_is_asked() -> None:
    names = {name for name in vars(Module) if not name.startswith(("_", "cudaHost"))}
    assert {name for name in names if not callable(getattr(torch.cuda, name, None))} == set()
    assert {"wait_stream", "wait_event"} <= set(dir(torch.cuda.Stream))
    assert {"record", "synchronize"} <= set(dir(torch.cuda.Event))


@pytest.mark.parametrize(
    ("kind", "has"), [("cuda", True), ("cpu", False), ("mps", False), ("xpu", False), ("meta", False)]
)
def test_streams_are_used_where_memory_of_ours_can_be_pinned(kind: str, has: bool) -> None:
    assert has_streams(torch.device(kind)) == has


def test_all_saves_share_a_stream_of_each_device_and_each_follows_the_training_anew(module: Module) -> None:
    """What a stream's work had for memory is kept for that stream."""
    there, here = (SimpleNamespace(tensor=SimpleNamespace(device=one)) for one in (DEVICE, torch.device("cpu")))
    kept: dict[Any, Any] = {}
    for count in (1, 2):
        found = far_of([here, there, there], kept)
        assert found is not None
        assert found.numbers == (1, 2)
        assert module.streams == 1
        assert module.calls == ["ours waits for the training's"] * count
    assert far_of([here], kept) is None


def test_work_is_given_to_our_stream_on_its_device_and_back_again(module: Module) -> None:
    """The device is entered first and left last: a stream alone leaves by way of the first device."""
    side = DeviceSide(DEVICE)
    side.follow()
    side.give(lambda: module.calls.append("work"))
    mark = side.mark()
    mark.hold_back()
    mark.wait()
    assert module.calls == [
        "ours waits for the training's",
        "to the device",
        "to our stream",
        "work",
        "back from our stream",
        "back from the device",
        "record",
        "the training waits",
        "the host waits",
    ]


def test_memory_is_pinned_for_all_devices_and_unpinned_when_nothing_is_on_its_way(module: Module) -> None:
    end = DeviceSide(DEVICE).pin(memoryview(bytearray(5000)))
    assert module.calls == ["to the device", "register 5000 with 1", "back from the device"]
    module.calls.clear()
    end()
    assert module.calls == ["synchronize", "unregister"]


def test_a_refusal_to_pin_is_no_error_and_is_told_to_no_kernel_of_the_training(module: Module) -> None:
    """The driver keeps it for the thread that asked."""
    module.answer = 2
    DeviceSide(DEVICE).pin(memoryview(bytearray(5000)))()
    assert "unregister" not in module.calls
    assert threading.get_ident() not in module.threads


def test_no_thread_to_ask_in_is_a_refusal_too(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    DeviceSide(DEVICE).pin(memoryview(bytearray(5000)))()
    assert module.calls == []
