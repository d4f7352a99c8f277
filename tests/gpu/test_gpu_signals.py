"""Stop signals reach a trainer whose kernels were compiled in its process: LLVM takes signal handlers over."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.dist.harness import events, start_trainer
from tests.gpu.test_gpu_model import BASE
from tests.tiny import write_run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def test_signals_after_kernels_were_compiled(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGUSR1 as before a time limit, then SIGTERM as at a preemption: both save, the run ends where it would have."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))  # empty: all kernels are compiled
    config, run = write_run(
        tmp_path,
        "run",
        BASE,
        train={"steps": 4000, "precision": "bf16", "cuda_graph": True},
        optimizer={"distributed": True, "lr": 1e-3, "warmup_steps": 1},
        checkpoint={"interval_steps": 0, "at_end": False},
    )
    reached = 0
    for number in (signal.SIGUSR1, signal.SIGTERM):
        job = start_trainer(1, tmp_path / f"log{int(number)}", config)
        request.addfinalizer(job.kill)
        job.wait_for(f"step {reached + 20:>7}/4000")
        os.kill(job.process.pid, number)
        assert job.wait() == 128 + number
        assert f"stopped by signal {int(number)}, saved" in job.output, job.output[-3000:]
        reached = events(run, "end")[-1]["step"]
    first, second = events(run, "end")
    assert second["step"] > first["step"] >= 20
    assert [start["step"] for start in events(run, "start")] == [0, first["step"]]
