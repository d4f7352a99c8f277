"""Adam with master weights inside, decided on the device: training and checkpoints as with megatron-core's own."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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


MASTERS: dict[str, dict[str, bool]] = {  # where they are kept
    "halves": {},
    "whole": {"store_param_remainders": False},
    "megatron": {"fused_master_weights": False},
}


def config(masters: str, folder: Path) -> RunConfig:
    # several buckets, with padding between them
    cfg = run_config("te", {"overlap_grad_reduce": True, "grad_bucket_params": 100_000})
    optimizer = replace(cfg.optimizer, **MASTERS[masters])  # type: ignore[arg-type]
    return replace(cfg, run=replace(cfg.run, dir=str(folder)), optimizer=optimizer)


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    from egmla_megatron.config.check import check_config
    from egmla_megatron.parallel.world import close_world, open_world

    cfg = config("halves", Path("unused"))
    yield open_world(cfg, check_config(cfg, 1))
    close_world()


def test_the_same_steps_and_checkpoints_that_either_reads(tmp_path: Path, world: Any) -> None:
    from tests.dist.reshard_worker import Run, same, tensors

    runs = {masters: Run(config(masters, tmp_path / masters), world) for masters in MASTERS}
    assert runs["halves"].optimizer.chained_optimizers[0].optimizer.store_param_remainders
    numbers = {masters: run.take(0, STEPS) for masters, run in runs.items()}
    saved = {}
    for masters, run in runs.items():
        assert numbers[masters] == pytest.approx(numbers["megatron"], rel=CLOSE)
        run.save(STEPS)
        saved[masters] = tmp_path / masters / "checkpoints" / f"step_{STEPS:08d}"
    stored = {masters: tensors(path) for masters, path in saved.items()}
    assert any("exp_avg" in key for key in stored["halves"])
    for masters in ("halves", "whole"):
        assert stored[masters].keys() == stored["megatron"].keys()
        for key, value in stored[masters].items():
            if "gate_norm_bias" in key:
                continue  # shifts a query's scores of all keys alike: the gradient of the keys' half is rounding alone
            assert value.dtype == stored["megatron"][key].dtype
            norm = value.double().norm().clamp_min(1e-12)
            found = float((value.double() - stored["megatron"][key].double()).norm() / norm)
            assert found < (0.05 if "exp_avg" in key else ALIKE), (masters, key, found)
    further = {masters: run.take(STEPS, 2) for masters, run in runs.items()}
    for masters in MASTERS:
        for origin, path in saved.items():
            cfg = config(masters, tmp_path / f"{masters}_from_{origin}")
            resumed = Run(cfg, world)
            resumed.load(path)
            resumed.save(STEPS)
            again = tensors(Path(cfg.run.dir) / "checkpoints" / f"step_{STEPS:08d}")
            others = [key for key in again if not same(again[key], stored[origin][key])]
            if masters == "halves" != origin:  # weights that lie between two bf16 numbers are rounded up
                others = [key for key in others if not one_step_apart(again[key], stored[origin][key])]
            assert others == [], (masters, origin)
            assert resumed.take(STEPS, 2) == pytest.approx(further[origin], rel=CLOSE)


def one_step_apart(mine: Tensor, other: Tensor) -> bool:
    """Few of many bf16 numbers, by the last bit."""
    differ = mine != other
    steps = mine.view(-1).view(dtype=torch.int16).int() - other.view(-1).view(dtype=torch.int16).int()
    return mine.dtype == torch.bfloat16 and int(steps.abs().max()) == 1 and float(differ.float().mean()) < 1e-3


def gradients_of_third_step(run: Any) -> tuple[dict[str, Tensor], list[float]]:
    """Main gradients when all passes of a step are done, behind two steps that left theirs in the buffers; losses."""
    from egmla_megatron.parallel.parity.training import sample_batches
    from egmla_megatron.train.step import train_step

    kept: dict[str, Tensor] = {}

    def keep() -> None:
        kept.update({name: p.main_grad.float().clone() for name, p in run.built.module.named_parameters()})

    losses = []
    for step in range(3):
        stream = sample_batches(run.cfg, run.world, step * run.cfg.train.global_batch_size)
        losses.append(train_step(run.cfg, run.world, run.model, run.optimizer, stream, meanwhile=keep).loss)
    return kept, losses


def test_gradients_that_are_written_and_tables_updated_by_rows(tmp_path: Path, world: Any) -> None:
    """Of four micro-batches, against gradients added to zeros and tables updated as a whole."""
    from tests.dist.reshard_worker import Run

    cfg = config("halves", tmp_path)
    fast = Run(cfg, world)
    (chunk,) = fast.model
    assert len(chunk.written) == 4 * 7 and len(chunk.deferred) == 1  # query, latent, up, gate, out, both of the MLP
    optimizer = replace(cfg.optimizer, deferred_table_updates=False)
    plain = Run(replace(cfg, optimizer=optimizer, parallel=replace(cfg.parallel, fused_grad_accumulation=False)), world)
    assert not plain.model[0].written and not plain.model[0].deferred
    (mine, losses), (expected, others) = gradients_of_third_step(fast), gradients_of_third_step(plain)
    assert losses == pytest.approx(others, rel=CLOSE)
    for name, value in expected.items():
        if "gate_norm_bias" not in name:
            found = float((mine[name] - value).norm() / value.norm())
            assert found < 0.05, (name, found)
    assert not fast.built.module.gate_table.weight.main_grad.any()  # the update left zeros


def test_a_step_that_is_not_finite(tmp_path: Path, world: Any) -> None:
    """Weights, moments and the count of steps stay, in the checkpoint, too; what follows is a run without that step."""
    from egmla_megatron.parallel.parity.training import sample_batches
    from egmla_megatron.train.step import train_step
    from tests.dist.reshard_worker import Run, same, tensors

    folders = {bad: tmp_path / str(bad) for bad in (False, True)}
    runs = {bad: Run(config("halves", folder), world) for bad, folder in folders.items()}
    for bad, run in runs.items():
        run.take(0, STEPS)
        if bad:
            weight = run.model[0].written[0]
            stream = sample_batches(run.cfg, run.world, 0)
            spoil = lambda weight=weight: weight.main_grad[1].fill_(math.inf)  # noqa: E731
            result = train_step(run.cfg, run.world, run.model, run.optimizer, stream, meanwhile=spoil)
            assert not result.applied and not math.isfinite(result.grad_norm)
        run.save(STEPS)
    saved = {bad: tensors(folder / "checkpoints" / f"step_{STEPS:08d}") for bad, folder in folders.items()}
    assert saved[True].keys() == saved[False].keys()
    for key, value in saved[False].items():  # kernels of attention add in any order
        if "gate_norm_bias" not in key:
            found = float((saved[True][key].double() - value.double()).norm() / value.double().norm().clamp_min(1e-12))
            assert found < (0.05 if "exp_avg" in key else ALIKE), (key, found)
    resumed = Run(config("halves", tmp_path / "resumed"), world)
    resumed.load(folders[True] / "checkpoints" / f"step_{STEPS:08d}")
    resumed.save(STEPS)
    again = tensors(tmp_path / "resumed" / "checkpoints" / f"step_{STEPS:08d}")
    assert [key for key in again if not same(again[key], saved[True][key])] == []
    further = [run.take(STEPS, 2) for run in (runs[False], runs[True], resumed)]
    for numbers in further[1:]:
        assert numbers == pytest.approx(further[0], rel=CLOSE)
    for run in (runs[True], resumed):
        plans = {group["step"] for each in run.optimizer.chained_optimizers for group in each.optimizer.param_groups}
        assert plans == {STEPS + 2}
