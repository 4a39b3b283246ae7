"""What the numbers of a run depend on besides its state: versions, device, kernels, switches."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import torch


def describe() -> dict[str, str]:
    """Return versions, device kind and determinism switches as text, for the manifest and for comparison.

    Nothing here begins the use of a device.
    """
    described = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": str(np.__version__),
        "machine": platform.machine(),
        "device": _device_kind(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "deterministic_algorithms": _determinism(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "cudnn_deterministic": str(torch.backends.cudnn.deterministic),
        "cudnn_benchmark": str(torch.backends.cudnn.benchmark),
    }
    cuda: Any = torch.cuda
    cudnn: Any = torch.backends.cudnn
    if cuda.is_available():
        described["cuda"] = str(torch.version.cuda)
        described["hip"] = str(torch.version.hip)
        described["cudnn"] = str(cudnn.version())
        described["cuda_matmul_allow_tf32"] = str(torch.backends.cuda.matmul.allow_tf32)
        described["cudnn_allow_tf32"] = str(torch.backends.cudnn.allow_tf32)
        if cuda.is_initialized():
            described["gpu"] = cuda.get_device_name()
    return described


def _device_kind() -> str:
    for kind in ("cuda", "xpu", "mps"):
        engine = getattr(torch, kind, None)
        if engine is not None and engine.is_available():
            return kind
    return "cpu"


def _determinism() -> str:
    if not torch.are_deterministic_algorithms_enabled():
        return "off"
    return "warn" if torch.is_deterministic_algorithms_warn_only_enabled() else "on"
