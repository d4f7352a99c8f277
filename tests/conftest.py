"""Shared by all tests: GPU tests are skipped, with the reason, where there is no CUDA device."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg")):
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run on the CPU; Triton reads it when it is imported


@cache
def _missing_gpu() -> str | None:
    import torch  # only when a GPU test was collected: most runs of single tests never need it

    return None if torch.cuda.is_available() else "no CUDA device on this machine"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and (reason := _missing_gpu()):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT
