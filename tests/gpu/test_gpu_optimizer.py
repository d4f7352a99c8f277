"""Adam with master weights inside, decided on the device: training and checkpoints as with megatron-core's own."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from egmla_megatron.config.schema import RunConfig
from tests.gpu.parallel_worker import run_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="no transformer_engine"),
]
STEPS = 3
CLOSE = 3e-4  # relative: other kernels, whose rounding makes bf16 weights differ in the last bit
ALIKE = (
    5e-3  # relative, of weights: the first steps of Adam only know a gradient's sign, and that of a tiny one can flip
)


def config(fused: bool, folder: Path) -> RunConfig:
    # several buckets, with padding between them
    cfg = run_config("te", {"overlap_grad_reduce": True, "grad_bucket_params": 100_000})
    optimizer = replace(cfg.optimizer, fused_master_weights=fused)
    return replace(cfg, run=replace(cfg.run, dir=str(folder)), optimizer=optimizer)


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    from egmla_megatron.config.check import check_config
    from egmla_megatron.parallel.world import close_world, open_world

    cfg = config(True, Path("unused"))
    yield open_world(cfg, check_config(cfg, 1))
    close_world()


def test_the_same_steps_and_checkpoints_that_either_reads(tmp_path: Path, world: Any) -> None:
    from tests.dist.reshard_worker import Run, same, tensors

    runs = {fused: Run(config(fused, tmp_path / str(fused)), world) for fused in (True, False)}
    assert runs[True].optimizer.chained_optimizers[0].optimizer.master_weights
    numbers = {fused: run.take(0, STEPS) for fused, run in runs.items()}
    assert numbers[True] == pytest.approx(numbers[False], rel=CLOSE)
    saved = {}
    for fused, run in runs.items():
        run.save(STEPS)
        saved[fused] = tmp_path / str(fused) / "checkpoints" / f"step_{STEPS:08d}"
    stored = {fused: tensors(path) for fused, path in saved.items()}
    assert stored[True].keys() == stored[False].keys()
    assert any("exp_avg" in key for key in stored[True])
    for key, value in stored[True].items():
        found = float((value.double() - stored[False][key].double()).norm() / value.double().norm().clamp_min(1e-12))
        assert found < (0.05 if "exp_avg" in key else ALIKE), (key, found)
    further = {fused: run.take(STEPS, 2) for fused, run in runs.items()}
    for fused in (True, False):
        for origin, path in saved.items():
            cfg = config(fused, tmp_path / f"{fused}_from_{origin}")
            resumed = Run(cfg, world)
            resumed.load(path)
            resumed.save(STEPS)
            again = tensors(Path(cfg.run.dir) / "checkpoints" / f"step_{STEPS:08d}")
            assert [key for key in again if not same(again[key], stored[origin][key])] == []
            assert resumed.take(STEPS, 2) == pytest.approx(further[origin], rel=1e-6 if fused == origin else CLOSE)
