"""What the numbers depend on: machine, software, commit."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

__all__ = ["commit", "hardware", "software"]

_PACKAGES = ("torch", "megatron-core", "transformer-engine", "numpy")
_ROOT = Path(__file__).resolve().parents[2]


def hardware(device: torch.device) -> dict[str, Any]:
    """Of this rank's machine."""
    cpu = re.search(r"model name\s*: (.*)", _read("/proc/cpuinfo"))
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpu": None,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "gpu_memory_gib": round(properties.total_memory / 2**30)}
    return found


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def software() -> dict[str, Any]:
    """Versions; None for what is not installed."""
    found: dict[str, Any] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def commit() -> str | None:
    """Of the checkout, with + where it has changes; None outside of one."""
    try:
        command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
