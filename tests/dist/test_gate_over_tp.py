"""The gate's kernels with heads on several ranks, by Triton's interpreter; tests/gpu has the same on GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.harness import start

pytestmark = pytest.mark.dist


def test_statistics_over_all_heads(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    output = start(2, ["tests/dist/gate_over_tp_worker.py"], tmp_path / "log", TRITON_INTERPRET="1").succeed()
    assert output.count("gate over ranks: all compared") == 2
