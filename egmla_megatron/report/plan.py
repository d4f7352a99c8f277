"""The cost of a configuration as plain data and as a table, without building anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from egmla_megatron.config.check import check_config
from egmla_megatron.config.check_model import check_model
from egmla_megatron.config.load import load_config
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.model.count import count_parameters, flops_per_token, kv_cache_elements_per_token
from egmla_megatron.report.cards import USABLE, Card
from egmla_megatron.report.memory import worst_stage
from egmla_megatron.report.search import search_layouts

__all__ = ["format_plan", "format_search", "make_plan", "make_search"]

# Bytes per parameter: weights in bf16, gradients summed in fp32, optimizer = fp32 master weight and two Adam moments.
_WEIGHT_BYTES, _GRADIENT_BYTES, _OPTIMIZER_BYTES = 2, 4, 12


def make_plan(
    config: str | Path, overrides: Sequence[str] = (), world_size: int | None = None, card: Card | None = None
) -> dict[str, Any]:
    """Returns counts (elements), operations (FLOPs per token) and bf16 training memory (bytes before sharding).

    With `world_size` the parallel layout is checked and added as `layout`, with the memory of the rank that needs most
    (on GPUs) and what fits into `card`. Raises UserError on bad input.
    """
    return _plan_of(load_config(config, overrides), world_size, card)


def _on_gpus(cfg: RunConfig) -> tuple[bool, bool]:
    """(layers by Transformer Engine, our kernels), as a GPU that has both would choose."""
    return cfg.parallel.implementation != "torch" and cfg.train.precision == "bf16", cfg.parallel.kernels != "torch"


def _plan_of(cfg: RunConfig, world_size: int | None, card: Card | None) -> dict[str, Any]:
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
        layout = check_config(cfg, world_size)
        plan["layout"] = dataclasses.asdict(layout)
        te, triton = _on_gpus(cfg)
        stage, of_rank = worst_stage(cfg, layout, te=te, triton=triton)
        plan["memory_per_rank_bytes"] = dataclasses.asdict(of_rank) | {"total": of_rank.total}
        plan["memory_worst_stage"] = stage
        plan["memory_assumes"] = f"layers by {'te' if te else 'torch'}, kernels {'triton' if triton else 'torch'}"
        if card is not None:
            plan["card"] = dataclasses.asdict(card)
            plan["fits"] = of_rank.total <= card.memory_gib * 2**30 * USABLE
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
    if "memory_per_rank_bytes" in plan:
        where = f"stage {plan['memory_worst_stage']}, {plan['memory_assumes']}"
        lines += ["", f"memory of the GPU that needs most ({where}; CUDA and NCCL hold 1 to 3 GiB more)"]
        lines += [f"  {part:<34} {size / 2**30:>12,.2f} GiB" for part, size in plan["memory_per_rank_bytes"].items()]
    if "fits" in plan:
        card = plan["card"]
        verdict = "fits" if plan["fits"] else "does not fit"
        lines.append(f"  {verdict} into one {card['name']} of {card['memory_gib']:.1f} GiB")
    if "layout" in plan:
        lines += ["", "layout"]
        lines += [f"  {name:<34} {size:>12,d}" for name, size in plan["layout"].items()]
    return "\n".join(lines)


def make_search(config: str | Path, overrides: Sequence[str], gpus: int, card: Card) -> dict[str, Any]:
    """Layouts that fit, best first, as plain data. Raises UserError on bad input."""
    cfg = load_config(config, overrides)
    check_model(cfg.model)
    te, triton = _on_gpus(cfg)
    found = search_layouts(cfg, gpus, card.memory_gib, te=te, triton=triton)
    layouts = [item.settings | {"memory_gib": round(item.total_gib, 2)} for item in found]
    return {"model": cfg.model.name, "gpus": gpus, "card": dataclasses.asdict(card), "layouts": layouts}


def format_search(found: dict[str, Any], most: int = 12) -> str:
    """The first layouts as lines for a person to read."""
    card, layouts = found["card"], found["layouts"]
    head = f"{found['model']} on {found['gpus']} {card['name']} of {card['memory_gib']:.1f} GiB: "
    if not layouts:
        return head + "nothing fits; more GPUs, or a smaller model"
    lines = [f"{head}{len(layouts)} layouts fit; nothing computed twice first, then the least model parallelism"]
    for layout in layouts[:most]:
        settings = " ".join(f"{key}={value}" for key, value in layout.items() if key != "memory_gib")
        lines.append(f"  {layout['memory_gib']:>7.2f} GiB  {settings}")
    return "\n".join(lines)
