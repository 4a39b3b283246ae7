"""Describe the machine and the versions, without names or paths."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import torch

import safepoint as sp

_PACKAGES = ("numpy", "xxhash", "safetensors", "torchsnapshot")


def describe(folder: Path) -> dict[str, object]:
    """Return what a reader needs to compare: processor, memory, disk's file system, versions, load.

    Args:
        folder: Where the files of the measurement lie.
    """
    kind, options = file_system(folder)
    return {
        "processor": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "processors": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "file_system": kind,
        "mount_options": options,
        "system": platform.system(),
        "kernel": platform.release(),
        "load_average": round(os.getloadavg()[0], 2),
        "torch_threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "safepoint": sp.__version__,
            **{name: _version(name) for name in _PACKAGES},
        },
    }


def file_system(folder: Path) -> tuple[str, str]:
    """Return type and mount options of the file system that holds a folder."""
    best = ("", "unknown", "")
    place = str(folder.resolve())
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        _, point, kind, options = line.split()[:4]
        is_above = place == point or place.startswith(point.rstrip("/") + "/")
        if is_above and len(point) >= len(best[0]):
            best = (point, kind, options)
    return best[1], best[2]


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
