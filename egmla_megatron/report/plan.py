"""The cost of a configuration as plain data, without building anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from egmla_megatron.config.check import Layout, check_config
from egmla_megatron.config.check_model import check_model
from egmla_megatron.config.load import load_config
from egmla_megatron.config.ranges import check_ranges
from egmla_megatron.config.schema import ModelConfig, Recompute, RunConfig
from egmla_megatron.config.values import as_text
from egmla_megatron.errors import UserError
from egmla_megatron.model.count import count_parameters, flops_per_token, kv_cache_elements_per_token
from egmla_megatron.report.cards import USABLE, WITHOUT_FP8, Card, Cluster
from egmla_megatron.report.distinct import with_measured_ids
from egmla_megatron.report.memory import (
    memory_per_rank,
    optimizer_bytes,
    parameters_of_rank,
    state_bytes,
    unique_fraction,
    worst_stage,
)
from egmla_megatron.report.rates import Workload
from egmla_megatron.report.search import pinned_settings, search_layouts
from egmla_megatron.report.step_time import StepTime, estimate_error, estimate_step, missing_for_estimate
from egmla_megatron.report.traffic import collectives_of_step

__all__ = ["Hardware", "check_price", "make_comparison", "make_plan", "make_search"]

_CACHE_BYTES = 2  # of a cached element, bf16
_LONG_CONTEXT = 32_768  # tokens
_COMPARABLE_LATENT = 4  # head dimensions in the latent of plain MLA: the paper's models that EG-MLA is compared with


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What a run is planned for."""

    card: Card
    cluster: Cluster
    gpu_hour_price: float | None = None  # of one GPU, in any currency


def check_price(price: float | None) -> None:
    """Raises UserError for a price that cannot be one."""
    if price is not None and not 0 <= price < 1e6:
        raise UserError(f"--gpu-hour-price: got {price:g}, allowed 0 to 1e6; give the price of one GPU for an hour")


def make_plan(
    config: str | Path, overrides: Sequence[str] = (), world_size: int | None = None, hardware: Hardware | None = None
) -> dict[str, Any]:
    """Returns counts (elements), operations (FLOPs per token), cache and training memory (bytes before sharding).

    Names end in their units (`_s`, `_bytes`, `_gib`, `_per_second`); those without one are counts, or shares of 1.

    With `world_size` the parallel layout is checked and added as `layout`, with the memory of the rank that needs most
    (on GPUs) and the bytes it sends; with `hardware` what fits, how long a step and the run take. Raises UserError on
    bad input. The run is planned as on GPUs, whatever this machine has.
    """
    cfg = load_config(config, overrides, gpu=True)
    check_ranges(cfg)
    check_model(cfg.model)
    plan = _plan_of_model(cfg)
    if cfg.model.gated:
        cfg, origin = with_measured_ids(cfg)
        plan["distinct_ids_of_micro_batch"] = _distinct_ids(cfg) | {"origin": origin}
    if world_size is not None:
        plan |= _plan_of_layout(cfg, check_config(cfg, world_size), hardware)
    return plan


def make_comparison(
    configs: Sequence[str], overrides: Sequence[str], world_size: int | None, hardware: Hardware | None
) -> dict[str, Any]:
    """Plans of several configurations, each by its path or name; overrides are for all. Raises UserError."""
    return {"plans": {name: make_plan(name, overrides, world_size, hardware) for name in configs}}


def make_search(config: str | Path, overrides: Sequence[str], gpus: int, hardware: Hardware) -> dict[str, Any]:
    """Layouts that fit, best first, as plain data; settings of the search that `overrides` give are pinned.

    Raises UserError on bad input.
    """
    cfg = load_config(config, overrides, gpu=True)
    check_ranges(cfg)
    check_model(cfg.model)
    te, triton = _on_gpus(cfg)
    pins, cfg = pinned_settings(cfg, overrides), with_measured_ids(cfg)[0]
    searched = search_layouts(cfg, gpus, hardware.card, hardware.cluster, pins, te=te, triton=triton)
    found, layouts = searched.found, []
    for item in found:
        layout = item.settings | {"memory_gib": round(item.total_gib, 2)}
        if item.tokens_per_second is not None:
            layout |= {"tokens_per_second": round(item.tokens_per_second), "limited_by": item.limited_by}
            layout |= {"estimate_error": item.error}
        layouts.append(layout)
    plan = {"model": cfg.model.name, "gpus": gpus, "card": dataclasses.asdict(hardware.card), "layouts": layouts}
    plan |= {"pinned": {name: as_text(value) for name, value in pins.items()}}
    if not found:
        near = searched.nearest
        sizes = {"memory_gib": round(near.total_gib, 2), "short_gib": round(near.short_gib(hardware.card), 2)}
        plan |= {"nearest": near.settings | sizes, "layouts_without_pin": searched.without_pin}
    missing = missing_for_estimate(cfg, found[0].layout, hardware.card, hardware.cluster) if found else None
    return plan | ({"estimate_missing": missing} if missing else {})


def _on_gpus(cfg: RunConfig) -> tuple[bool, bool]:
    """(layers by Transformer Engine, our kernels), as a GPU that has both would choose."""
    return cfg.parallel.implementation != "torch" and cfg.train.precision == "bf16", cfg.parallel.kernels != "torch"


def _plan_of_model(cfg: RunConfig) -> dict[str, Any]:
    parameters = count_parameters(cfg.model)
    flops = flops_per_token(cfg.model, cfg.train.seq_length)
    memory = {
        "weights": cfg.train.element_bytes * parameters.total,
        "gradients": cfg.parallel.grad_element_bytes * parameters.total,
        "optimizer": state_bytes(cfg, sharded=cfg.optimizer.distributed, te=_on_gpus(cfg)[0]) * parameters.total,
    }
    return {
        "model": cfg.model.name,
        "active_params": parameters.active,
        "gate_table_params": parameters.gate_tables,
        "total_params": parameters.total,
        "kv_cache_elements_per_token": kv_cache_elements_per_token(cfg.model),
        "kv_cache": _cache(cfg.model),
        "params_by_part": parameters.by_part,
        "seq_length": cfg.train.seq_length,
        "flops_per_token_forward": flops.forward,
        "flops_per_token_forward_backward": flops.forward_backward,
        "flops_per_token_forward_by_part": flops.by_part,
        "precision": cfg.train.precision,
        "training_memory_bytes": memory | {"total": sum(memory.values())},
        "tokens": cfg.total_steps * cfg.train.global_batch_size * cfg.train.seq_length,
        "steps": cfg.total_steps,
    }


def _distinct_ids(cfg: RunConfig) -> dict[str, Any]:
    tokens = cfg.train.micro_batch_size * cfg.train.seq_length // cfg.parallel.context
    return {"tokens": tokens, "fraction": round(unique_fraction(tokens, cfg.data.unique_fractions), 4)}


def _cache(model: ModelConfig) -> dict[str, dict[str, int]]:
    """Bytes in bf16 of this model's cache, and of plain MLA's and MHA's with the same layers and heads."""
    kinds = {"this model": model}
    if model.attention == "mla":
        latent = _COMPARABLE_LATENT * model.v_head_dim
        plain = {"gate": "none", "kv_emb_dim": 0}
        kinds[f"MLA, latent {latent}"] = replace(model, **plain, kv_lora_rank=latent)  # type: ignore[arg-type]
        kinds["MHA"] = replace(model, **plain, attention="mha")  # type: ignore[arg-type]
    sizes = {name: _CACHE_BYTES * kv_cache_elements_per_token(kind) for name, kind in kinds.items()}
    return {
        name: {"bytes_per_token": size, "bytes_per_32k_context": size * _LONG_CONTEXT} for name, size in sizes.items()
    }


def _plan_of_layout(cfg: RunConfig, layout: Layout, hardware: Hardware | None) -> dict[str, Any]:
    te, triton = _on_gpus(cfg)
    stage, of_rank = worst_stage(cfg, layout, te=te, triton=triton)
    activations = {}
    for choice in get_args(Recompute):
        again = replace(cfg, train=replace(cfg.train, recompute=choice))
        activations[choice] = memory_per_rank(again, layout, stage, te=te, triton=triton).activations
    parts = [parameters_of_rank(cfg, layout, each) for each in range(layout.pp)]
    plan: dict[str, Any] = {
        "layout": dataclasses.asdict(layout),
        "params_per_rank_by_stage": [{"dense": dense, "gate_tables": tables} for dense, tables in parts],
        "memory_per_rank_bytes": dataclasses.asdict(of_rank) | {"total": of_rank.total},
        "memory_worst_stage": stage,
        "memory_assumes": f"layers by {'te' if te else 'torch'}, kernels {'triton' if triton else 'torch'}"
        + ("" if cfg.train.fp8 == "none" else ", linear layers in FP8"),
        "recompute": cfg.train.recompute,
        "cuda_graph": cfg.train.cuda_graph,
        "activations_bytes_by_recompute": activations,
        "distributed_optimizer": cfg.optimizer.distributed,
        "optimizer_bytes": {
            "distributed": optimizer_bytes(cfg, layout, stage, sharded=True, te=te),
            "not distributed": optimizer_bytes(cfg, layout, stage, sharded=False, te=te),
        },
        "sent_per_step_and_rank": _sent(cfg, layout),
    }
    if hardware is not None:
        _refuse_fp8_without_it(cfg, hardware.card)
        plan["card"] = dataclasses.asdict(hardware.card)
        plan["cluster"] = dataclasses.asdict(hardware.cluster)
        plan["fits"] = of_rank.total <= hardware.card.memory_gib * 2**30 * USABLE
        plan |= _plan_of_time(cfg, layout, hardware, te=te, triton=triton)
    return plan


def _refuse_fp8_without_it(cfg: RunConfig, card: Card) -> None:
    if cfg.train.fp8 != "none" and card.name in WITHOUT_FP8:
        raise UserError(
            f"train.fp8: got {cfg.train.fp8} with --gpu {card.name}, which has no FP8 (Hopper and newer have); allowed "
            "none; set train.fp8=none, or plan for another card"
        )


def _sent(cfg: RunConfig, layout: Layout) -> list[dict[str, Any]]:
    """Of a rank of the stage that sends most."""
    stages = [collectives_of_step(cfg, layout, stage) for stage in range(layout.pp)]
    most = max(stages, key=lambda found: sum(each.sent_bytes for each in found))
    return [dataclasses.asdict(each) for each in most]


def _plan_of_time(cfg: RunConfig, layout: Layout, hardware: Hardware, *, te: bool, triton: bool) -> dict[str, Any]:
    missing = missing_for_estimate(cfg, layout, hardware.card, hardware.cluster)
    if missing:
        return {"estimate": None, "estimate_missing": missing}
    step = estimate_step(cfg, layout, hardware.card, hardware.cluster, te=te, triton=triton)
    return {
        "estimate": dataclasses.asdict(step) | _rates(cfg, layout, hardware.card, step),
        "estimate_error": estimate_error(cfg),
        "graph_tokens_per_second": _with_graph(cfg, layout, hardware, te=te, triton=triton),
        "budget": _budget(cfg, layout, step, hardware.gpu_hour_price),
    }


def _rates(cfg: RunConfig, layout: Layout, card: Card, step: StepTime) -> dict[str, float | None]:
    work = Workload.of(cfg)
    rates = work.rates(step.step_s, layout.world_size, card.bf16_tflops * 1e12)
    return {"tokens_per_step": work.tokens, **rates.named()}


def _with_graph(cfg: RunConfig, layout: Layout, hardware: Hardware, *, te: bool, triton: bool) -> float | None:
    """Tokens per second with train.cuda_graph where it is off and could be on; else None."""
    if cfg.train.cuda_graph:
        return None
    graph = replace(cfg, train=replace(cfg.train, cuda_graph=True))
    try:
        check_config(graph, layout.world_size)
    except UserError:
        return None
    step = estimate_step(graph, layout, hardware.card, hardware.cluster, te=te, triton=triton)
    return Workload.of(cfg).tokens / step.step_s


def _budget(cfg: RunConfig, layout: Layout, step: StepTime, price: float | None) -> dict[str, float | None]:
    """Of the steps alone: evaluations, checkpoints and restarts come on top."""
    hours = cfg.total_steps * step.step_s / 3600
    gpu_hours = hours * layout.world_size
    return {
        "days": hours / 24,
        "gpu_hours": gpu_hours,
        "gpu_hour_price": price,
        "cost": None if price is None else gpu_hours * price,
    }
