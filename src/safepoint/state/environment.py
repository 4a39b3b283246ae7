"""What the numbers of a run depend on besides its state: versions, device, kernels, switches."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from safepoint.state.glance import Glances

_DEVICE = attrgetter("device")


def describe(
    objects: Iterable[object] = (), *, workspace: str | None = None, glances: Glances | None = None
) -> dict[str, str]:
    """Return versions, device kinds and determinism switches as text, for the manifest and for comparison.

    Nothing here begins the use of a device.

    Args:
        objects: The registered objects; the kinds of devices are those that their tensors lie on.
        workspace: The variable CUBLAS_WORKSPACE_CONFIG, which decides whether cuBLAS sums in a fixed order.
        glances: How modules are looked at.
    """
    described = {
        **_of_process(),
        "device": "+".join(sorted(_device_kinds(objects, glances or Glances()))) or "cpu",
        "threads": str(torch.get_num_threads()),
        "deterministic_algorithms": _determinism(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "cudnn_deterministic": str(torch.backends.cudnn.deterministic),
        "cudnn_benchmark": str(torch.backends.cudnn.benchmark),
        "mkldnn": str(torch.backends.mkldnn.enabled),
    }
    cuda: Any = torch.cuda
    cudnn: Any = torch.backends.cudnn
    if cuda.is_available():
        described["cublas_workspace"] = workspace or "not set"
        described["attention_kernels"] = ", ".join(_attention_kernels()) or "none"
        described["cuda"] = str(torch.version.cuda)
        described["hip"] = str(torch.version.hip)
        described["cudnn"] = str(cudnn.version())
        described["cuda_matmul_allow_tf32"] = str(torch.backends.cuda.matmul.allow_tf32)
        described["cudnn_allow_tf32"] = str(torch.backends.cudnn.allow_tf32)
        if cuda.is_initialized():
            described["gpu"] = cuda.get_device_name()
    return described


@cache
def _of_process() -> Mapping[str, str]:
    """Return what cannot change while the process lives."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": str(np.__version__),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _device_kinds(objects: Iterable[object], glances: Glances) -> set[str]:
    tensors = chain.from_iterable(_tensors_of(entry, glances) for entry in objects)
    return {device.type for device in set(map(_DEVICE, tensors))}


def _tensors_of(entry: object, glances: Glances) -> Iterator[torch.Tensor]:
    waiting, seen = [entry], set[int]()
    while waiting:
        one = waiting.pop()
        if isinstance(one, torch.nn.Module):
            yield from glances.tensors_of(one)
        elif isinstance(one, torch.optim.Optimizer):
            yield from chain.from_iterable(group["params"] for group in one.param_groups)
        elif isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, dict | list | tuple) and id(one) not in seen:
            # A container may hold itself; that is refused where it is to be stored.
            seen.add(id(one))
            values = list(one.values() if isinstance(one, dict) else one)
            if all(issubclass(kind, torch.Tensor) for kind in set(map(type, values))):
                yield from values
            else:
                waiting += values


def _attention_kernels() -> list[str]:
    switches: Any = torch.backends.cuda
    names = ("flash", "mem_efficient", "math", "cudnn")
    return [name for name in names if getattr(switches, f"{name}_sdp_enabled")()]


def _determinism() -> str:
    if not torch.are_deterministic_algorithms_enabled():
        return "off"
    return "warn" if torch.is_deterministic_algorithms_warn_only_enabled() else "on"
