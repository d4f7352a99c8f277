"""What `tools/bench_kernels.py` was asked for, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from egmla_megatron.bench.schedule import Schedule
from egmla_megatron.bench.train_variants import VARIANTS, train_config
from egmla_megatron.cli import check_count
from egmla_megatron.config.check import Layout, check_config
from egmla_megatron.config.schema import RunConfig
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
    return KernelBench(cfg, check_config(cfg, 1), repeats, distinct_fraction, json)


def _refuse_other_kernels(cfg: RunConfig) -> None:
    """Settings with which a step runs other kernels than those that are timed."""
    model, parallel, train = cfg.model, cfg.parallel, cfg.train
    found: dict[str, tuple[object, object]] = {
        "parallel.tensor": (parallel.tensor, 1),
        "parallel.pipeline": (parallel.pipeline, 1),
        "parallel.context": (parallel.context, 1),
        "model.attention": (model.attention, "mla"),
        "train.recompute": (train.recompute, "none"),
        "train.fp8": (train.fp8, "none"),
        "model.attention_dropout": (model.attention_dropout, 0.0),
        "model.hidden_dropout": (model.hidden_dropout, 0.0),
        "run.deterministic": (cfg.run.deterministic, False),
        "parallel.grad_reduce_dtype": (parallel.grad_reduce_dtype, "fp32"),
    }
    if model.gated:
        found["parallel.unique_ids"] = (parallel.unique_ids, True)
    for name, (got, allowed) in found.items():
        if got != allowed:
            value, shown = (str(each).lower() if isinstance(each, bool) else str(each) for each in (allowed, got))
            refuse(f"{name}: kernels are timed one by one for one device", shown, value, f"set {name}={value}")
