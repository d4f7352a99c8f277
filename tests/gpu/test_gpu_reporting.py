"""What a run on a GPU says of its steps: device events, with and without a CUDA graph, memory, a trace with kernels."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.dist.harness import events, start_trainer
from tests.gpu.test_gpu_model import BASE
from tests.tiny import write_run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize(("setting", "graph"), [("false", False), ("auto", True)])
def test_a_run_on_one_gpu(tmp_path: Path, setting: str, graph: bool) -> None:
    config, run = write_run(
        tmp_path,
        "run",
        BASE,
        train={"steps": 8, "precision": "bf16"},
        optimizer={"distributed": True, "lr": 1e-3, "warmup_steps": 1},
        profile={"steps": (6, 7)},
        checkpoint={"interval_steps": 0, "at_end": False},
    )
    output = start_trainer(1, tmp_path / "log", config, f"train.cuda_graph={setting}").succeed()
    assert events(run, "start")[0]["cuda_graph"] is graph
    assert ("passes as one CUDA graph" in output) is graph
    steps = events(run, "step")
    assert len(steps) == 8
    for step in steps:
        assert step["time_exchange_s"] == 0.0  # one rank exchanges nothing
        assert (step["time_gradient_sync_s"] is None) == graph
        names = ("data", "forward_backward", "gradient_sync", "optimizer")
        parts = [step[f"time_{name}_s"] or 0.0 for name in names]
        assert min(parts) >= 0 and parts[1] > 0 and parts[3] > 0
        assert sum(parts) <= 1.01 * step["step_time_s"]  # two clocks
        assert step["reserved_memory_mib"] >= step["peak_memory_mib"] > 0
    assert all(step["slowest_rank"] == 0 for step in steps[2:])  # the second may be launched before the first is done
    (trace,) = (run / "profile").iterdir()
    found = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in found)
