"""What `tools/bench_kernels.py` was asked for, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from egmla_megatron.bench.schedule import Schedule
from egmla_megatron.bench.train_variants import VARIANTS, precision_remark, train_config
from egmla_megatron.cli import check_count
from egmla_megatron.config.check import Layout, check_config
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.config.values import as_text
from egmla_megatron.config.workable import refuse
from egmla_megatron.environment import whole_number
from egmla_megatron.folders import refuse_unwritable_file

__all__ = ["KernelBench", "kernel_bench"]

_MOST_REPEATS = 10_000


@dataclass(frozen=True)
class KernelBench:
    """What runs."""

    cfg: RunConfig
    layout: Layout  # of one rank
    repeats: int  # measurements of every kernel
    distinct_fraction: float  # distinct ids / tokens of the micro-batch
    json: Path | None
    remarks: tuple[str, ...] = ()  # in which the run differs from the configuration


def kernel_bench(
    config: str, overrides: list[str], repeats: int, distinct_fraction: float, json: Path | None, *, cuda: bool
) -> KernelBench:
    """Of a command line.

    Raises:
        UserError: it cannot be meant so, or names what is not measured here.
    """
    ranks = whole_number("WORLD_SIZE", 1, 1)
    if ranks != 1:
        refuse("number of ranks", ranks, "1: kernels run on one device", "start the tool with python, without launcher")
    check_count("--repeats", repeats, 1, _MOST_REPEATS)
    if not (math.isfinite(distinct_fraction) and 0 < distinct_fraction <= 1):
        refuse("--distinct-fraction", distinct_fraction, "above 0, up to 1", "give 0.2, or leave the option out")
    if json is not None:
        refuse_unwritable_file("--json", json)
    cfg = train_config(config, overrides, VARIANTS["base"], Schedule(0, 1, 0), cuda=cuda)
    _refuse_other_kernels(cfg)
    remarks = [precision_remark(config, overrides, cfg)]
    group = cfg.parallel.gate_group
    if group > 1 and cfg.model.gated:
        cfg = replace(cfg, parallel=replace(cfg.parallel, gate_group=1))
        remarks.append(
            f"One device is one rank: measured with parallel.gate_group=1, where {config} has {group}. A rank of "
            "such a group updates a part of the tables only; the other kernels are the same."
        )
    return KernelBench(cfg, check_config(cfg, 1), repeats, distinct_fraction, json, tuple(filter(None, remarks)))


def _refuse_other_kernels(cfg: RunConfig) -> None:
    """Settings with which a step runs other kernels than those that are timed."""
    model, parallel, train = cfg.model, cfg.parallel, cfg.train
    found: dict[str, tuple[object, object, str]] = {
        "parallel.tensor": (parallel.tensor, 1, "times kernels of whole layers, not a tensor-parallel rank's share"),
        "parallel.pipeline": (parallel.pipeline, 1, "times the kernels of all layers on one device"),
        "parallel.context": (parallel.context, 1, "times kernels on whole sequences"),
        "model.attention": (model.attention, "mla", "times the kernels of MLA and EG-MLA"),
        "train.recompute": (train.recompute, "none", "counts every kernel once a pass, nothing that is computed again"),
        "train.fp8": (train.fp8, "none", "times matrix products in bf16 or fp32"),
        "model.attention_dropout": (model.attention_dropout, 0.0, "times attention without dropout"),
        "model.hidden_dropout": (model.hidden_dropout, 0.0, "times residual sums without dropout"),
        "run.deterministic": (cfg.run.deterministic, False, "times kernels that need not repeat to the last bit"),
        "parallel.grad_reduce_dtype": (parallel.grad_reduce_dtype, "fp32", "times an update from fp32 gradients"),
    }
    if model.gated:
        found["parallel.unique_ids"] = (
            parallel.unique_ids,
            True,
            "times the gate on the distinct ids of a micro-batch",
        )
    for name, (got, allowed, does) in found.items():
        if got != allowed:
            refuse(f"{name}: the tool {does}", got, as_text(allowed), f"set {name}={as_text(allowed)}")
