"""The cost of a configuration as plain data and as a table, without building anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from egmla_megatron.config.check import check_config
from egmla_megatron.config.check_model import check_model
from egmla_megatron.config.load import load_config
from egmla_megatron.model.count import count_parameters, flops_per_token, kv_cache_elements_per_token

__all__ = ["format_plan", "make_plan"]

# Bytes per parameter: weights in bf16, gradients summed in fp32, optimizer = fp32 master weight and two Adam moments.
_WEIGHT_BYTES, _GRADIENT_BYTES, _OPTIMIZER_BYTES = 2, 4, 12


def make_plan(config: str | Path, overrides: Sequence[str] = (), world_size: int | None = None) -> dict[str, Any]:
    """Returns counts (elements), operations (FLOPs per token) and bf16 training memory (bytes before sharding).

    With `world_size` the parallel layout is checked and added as `layout`. Raises UserError on bad input.
    """
    cfg = load_config(config, overrides)
    check_model(cfg.model)
    parameters = count_parameters(cfg.model)
    flops = flops_per_token(cfg.model, cfg.train.seq_length)
    memory = {
        "weights": _WEIGHT_BYTES * parameters.total,
        "gradients": _GRADIENT_BYTES * parameters.total,
        "optimizer": _OPTIMIZER_BYTES * parameters.total,
    }
    plan: dict[str, Any] = {
        "model": cfg.model.name,
        "active_params": parameters.active,
        "gate_table_params": parameters.gate_tables,
        "total_params": parameters.total,
        "kv_cache_elements_per_token": kv_cache_elements_per_token(cfg.model),
        "params_by_part": parameters.by_part,
        "seq_length": cfg.train.seq_length,
        "flops_per_token_forward": flops.forward,
        "flops_per_token_forward_backward": flops.forward_backward,
        "flops_per_token_forward_by_part": flops.by_part,
        "training_memory_bytes": memory | {"total": sum(memory.values())},
    }
    if world_size is not None:
        plan["layout"] = dataclasses.asdict(check_config(cfg, world_size))
    return plan


def format_plan(plan: dict[str, Any]) -> str:
    """Returns the plan as lines for a person to read; sizes in millions, MFLOP and GiB."""
    lines = [f"{'model':<36} {plan['model']}"]
    for key in ("active_params", "gate_table_params", "total_params"):
        lines.append(f"{key:<36} {plan[key] / 1e6:>12,.1f} M")
    lines.append(f"{'kv_cache_elements_per_token':<36} {plan['kv_cache_elements_per_token']:>12,d}")
    lines += ["", "parameters by part"]
    lines += [f"  {part:<34} {count / 1e6:>12,.3f} M" for part, count in plan["params_by_part"].items()]
    lines += ["", f"operations per token at {plan['seq_length']} tokens (a multiply-add is two)"]
    by_part = plan["flops_per_token_forward_by_part"]
    lines += [f"  {part:<34} {count / 1e6:>12,.3f} MFLOP" for part, count in by_part.items()]
    lines.append(f"  {'forward':<34} {plan['flops_per_token_forward'] / 1e6:>12,.1f} MFLOP")
    lines.append(f"  {'forward and backward':<34} {plan['flops_per_token_forward_backward'] / 1e6:>12,.1f} MFLOP")
    lines += ["", "bf16 training memory before sharding and without activations"]
    lines += [f"  {part:<34} {size / 2**30:>12,.2f} GiB" for part, size in plan["training_memory_bytes"].items()]
    if "layout" in plan:
        lines += ["", "layout"]
        lines += [f"  {name:<34} {size:>12,d}" for name, size in plan["layout"].items()]
    return "\n".join(lines)
