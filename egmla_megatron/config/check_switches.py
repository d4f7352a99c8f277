"""Switches that exclude each other."""

from __future__ import annotations

from egmla_megatron.config.schema import RunConfig
from egmla_megatron.config.workable import refuse

__all__ = ["check_switches", "graph_obstacles"]


def graph_obstacles(cfg: RunConfig) -> dict[str, tuple[object, object]]:
    """What is set that `train.cuda_graph` rules out: section.key -> (value, the one that is allowed).

    A captured step repeats what the host did once, which must be what it would do for any step.
    """
    model = cfg.model
    table: dict[str, tuple[object, object]] = {
        "parallel.pipeline": (cfg.parallel.pipeline, 1),
        # captured, their collectives and the gate group's waited for each other forever on two GPUs
        "parallel.tensor": (cfg.parallel.tensor, 1),
        "parallel.context": (cfg.parallel.context, 1),
        "train.recompute": (cfg.train.recompute, "none"),
        "model.hidden_dropout": (model.hidden_dropout, 0.0),
        "model.attention_dropout": (model.attention_dropout, 0.0),
        "run.deterministic": (cfg.run.deterministic, False),
    }
    return {name: (got, allowed) for name, (got, allowed) in table.items() if got != allowed}


def _check_graph(cfg: RunConfig) -> None:
    if not cfg.train.cuda_graph:
        return
    for name, (got, allowed) in graph_obstacles(cfg).items():
        value = str(allowed).lower()
        fix = f"set train.cuda_graph=false or {name}={value}"
        refuse(f"train.cuda_graph captures whole steps, which is not supported with {name}", got, value, fix)


def _check_fp8(cfg: RunConfig) -> None:
    """FP8 is Transformer Engine's, wants sides of 16 elements, and was tried under data parallelism only."""
    if cfg.train.fp8 == "none":
        return
    model, parallel = cfg.model, cfg.parallel
    heads = model.num_attention_heads
    found: dict[str, tuple[object, object]] = {
        "parallel.implementation": (parallel.implementation, "te"),
        "train.precision": (cfg.train.precision, "bf16"),
        "model.attention": (model.attention, "mla"),
        "parallel.tensor": (parallel.tensor, 1),
        "parallel.pipeline": (parallel.pipeline, 1),
        "parallel.context": (parallel.context, 1),
        "train.recompute": (cfg.train.recompute, "none"),
    }
    for name, (got, allowed) in found.items():
        if got != allowed and (name, got) != ("parallel.implementation", "auto"):
            refuse(
                f"train.fp8={cfg.train.fp8} with {name}", got, str(allowed), f"set {name}={allowed} or train.fp8=none"
            )
    sides = {
        "model.hidden_size": model.hidden_size,
        "model.intermediate_size": model.intermediate_size,
        "model.kv_lora_rank": model.kv_lora_rank,
        "model.kv_lora_rank + model.qk_rope_head_dim": model.kv_lora_rank + model.qk_rope_head_dim,
        "model.q_lora_rank": model.q_lora_rank,
        "heads * (qk_nope_head_dim + qk_rope_head_dim)": heads * (model.qk_nope_head_dim + model.qk_rope_head_dim),
        "heads * (qk_nope_head_dim + v_head_dim)": heads * (model.qk_nope_head_dim + model.v_head_dim),
        "heads * v_head_dim": heads * model.v_head_dim,
        "train.micro_batch_size * train.seq_length": cfg.train.micro_batch_size * cfg.train.seq_length,
    }
    for name, size in sides.items():
        if size % 16:
            refuse(f"train.fp8={cfg.train.fp8}: {name}", size, "multiples of 16", "set train.fp8=none or change it")


def check_switches(cfg: RunConfig) -> None:
    """Raises UserError for the first pair that cannot be."""
    parallel = cfg.parallel
    _check_graph(cfg)
    _check_fp8(cfg)
    if parallel.overlap_param_gather and not cfg.optimizer.distributed:
        refuse(
            "parallel.overlap_param_gather gathers what the distributed optimizer sharded",
            "optimizer.distributed=false",
            "optimizer.distributed=true",
            "set parallel.overlap_param_gather=false or optimizer.distributed=true",
        )
    if parallel.grad_reduce_dtype == "bf16" and cfg.train.precision == "fp32":
        refuse(
            "parallel.grad_reduce_dtype: the gradients of fp32 weights are fp32",
            "bf16 with train.precision=fp32",
            "fp32",
            "set parallel.grad_reduce_dtype=fp32 or train.precision=bf16",
        )
    if parallel.implementation == "te" and cfg.train.precision == "fp32":
        refuse(
            "train.precision: Transformer Engine has no fused fp32 attention",
            "fp32 with parallel.implementation=te",
            "bf16",
            "set parallel.implementation=torch",
        )
    if parallel.implementation == "te" and parallel.attention_backend not in ("auto", "te_fused"):
        refuse(
            "parallel.attention_backend names an attention kernel of torch (parallel.implementation=te)",
            parallel.attention_backend,
            "auto, te_fused",
            "set parallel.implementation=torch",
        )
    if parallel.attention_backend == "te_fused" and parallel.implementation == "torch":
        refuse(
            "parallel.attention_backend=te_fused is attention of Transformer Engine",
            "parallel.implementation=torch",
            "auto or te",
            "set parallel.attention_backend=auto",
        )
