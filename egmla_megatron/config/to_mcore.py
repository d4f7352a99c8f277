"""RunConfig -> megatron-core's transformer, DDP and optimizer configurations. The only place that maps names."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from egmla_megatron.config.schema import ParallelConfig, RunConfig

__all__ = ["EGMLATransformerConfig", "ddp_config", "fused_master_weights", "optimizer_config", "transformer_config"]

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass
class EGMLATransformerConfig(MLATransformerConfig):
    """megatron-core's MLA configuration with the gate (names and units as in `ModelConfig`)."""

    kv_emb_dim: int = 0
    gate: str = "none"
    gate_norm: bool = True
    gate_norm_eps: float = 1e-5
    gate_table_init_std: float = 1.0
    gate_exchange: str = "all_to_all"
    gate_granularity: str = "fused"
    sdpa_backend: str = "math"
    triton_kernels: bool = False  # gate and heads by our kernels
    fused_grad_accumulation: bool = False  # in the layers; `gradient_accumulation_fusion` would ask apex for the rest


@dataclass
class MHATransformerConfig(TransformerConfig):
    """megatron-core's configuration with the SDPA backend of our core attention."""

    kv_emb_dim: int = 0  # no gate
    sdpa_backend: str = field(default="math")


def _common(cfg: RunConfig, implementation: str, sdpa_backend: str) -> dict[str, Any]:
    """What MLA and MHA share. All fusions that need apex, or a GPU that may not be there, stay off."""
    model, train, parallel = cfg.model, cfg.train, cfg.parallel
    dtype = DTYPES[train.precision]
    te = implementation == "te"
    recompute: dict[str, Any] = {}
    if train.recompute == "full":
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif train.recompute == "selective":
        modules = ["mla_up_proj"] if model.attention == "mla" else ["core_attn"]
        recompute = {"recompute_granularity": "selective", "recompute_modules": modules}
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "ffn_hidden_size": model.intermediate_size,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "init_method_std": model.init_std,
        "bf16": train.precision == "bf16",
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        # costs a pass over the gradients, so only where micro-batches may hold unequally many tokens that count
        "calculate_per_token_loss": cfg.data.eod_mask_loss,
        "autocast_dtype": dtype,
        "attention_softmax_in_fp32": True,
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "context_parallel_size": parallel.context,
        "cp_comm_type": "p2p" if parallel.context > 1 else None,  # for TE: keys and values go round in a ring
        **_interleaving(parallel),
        "sequence_parallel": parallel.sequence,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "deterministic_mode": False,  # megatron-core's switch only checks environment variables; see parallel.world
        # SwiGLU and the addition of the residual's gradient in RMSNorm by Transformer Engine's kernels
        "use_te_activation_func": te and model.attention == "mla",
        "fused_residual_rmsnorm": te and model.attention == "mla",
        "bias_activation_fusion": te and train.precision == "bf16" and model.attention == "mha",
        "bias_dropout_fusion": te and train.precision == "bf16",
        **_fp8(cfg),
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "cross_entropy_loss_fusion": te and train.precision == "bf16",
        "cross_entropy_fusion_impl": "te" if te else "native",
        "attention_backend": AttnBackend.fused if te else AttnBackend.auto,
        "transformer_impl": "transformer_engine" if te else "local",
        "sdpa_backend": sdpa_backend,
        **recompute,
    }


def _fp8(cfg: RunConfig) -> dict[str, Any]:
    """Linear layers by Transformer Engine in FP8, each tensor scaled by its own largest element of the moment: no
    history that a checkpoint or a CUDA graph would have to carry. What is no such layer stays in bf16."""
    return {} if cfg.train.fp8 == "none" else {"fp8": "hybrid", "fp8_recipe": cfg.train.fp8}


def _interleaving(parallel: ParallelConfig) -> dict[str, Any]:
    """Nothing for a plain pipeline. Between two stages a batch of transfers would hold several of one pair of ranks,
    which megatron-core's own trainer refuses, so each is an operation of its own."""
    if parallel.virtual_pipeline == 1:
        return {}
    return {
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline,
        "overlap_p2p_comm": True,
        "batch_p2p_comm": False,
    }


def transformer_config(cfg: RunConfig, implementation: str, sdpa_backend: str, *, triton: bool = False) -> Any:
    """megatron-core's transformer configuration.

    Args:
        implementation: "te" or "torch", resolved.
        sdpa_backend: resolved name of the SDPA kernel, see `core_attention.choose_backend`.
        triton: gate and heads by our kernels.
    """
    model = cfg.model
    common = _common(cfg, implementation, sdpa_backend)
    if model.attention == "mha":
        return MHATransformerConfig(
            **common,
            kv_channels=model.v_head_dim,
            normalization="LayerNorm",
            layernorm_epsilon=1e-5,
            add_bias_linear=True,
            activation_func=F.gelu,
        )
    return EGMLATransformerConfig(
        **common,
        normalization="RMSNorm",
        layernorm_epsilon=model.rms_norm_eps,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        q_lora_rank=model.q_lora_rank or None,
        kv_lora_rank=model.kv_lora_rank,
        qk_head_dim=model.qk_nope_head_dim,
        qk_pos_emb_head_dim=model.qk_rope_head_dim,
        v_head_dim=model.v_head_dim,
        rope_type="rope",
        rotary_base=model.rope_theta,
        apply_rope_fusion=False,  # the fused kernel needs yarn and a power of two of heads
        qk_layernorm=False,  # the spec brings the norms, see EGMLASelfAttention._resolve_qk_norm_config
        kv_emb_dim=model.kv_emb_dim,
        gate=model.gate,
        gate_norm=model.gate_norm,
        gate_norm_eps=model.gate_norm_eps,
        gate_table_init_std=model.gate_table_init_std,
        gate_exchange=cfg.parallel.gate_exchange,
        gate_granularity=cfg.parallel.gate_granularity,
        triton_kernels=triton,
        fused_grad_accumulation=implementation == "te" and cfg.parallel.fused_grad_accumulation,
    )


def ddp_config(cfg: RunConfig, *, average: bool = False) -> DistributedDataParallelConfig:
    """NaN is handled by the step, which can skip, not by an assertion.

    Args:
        average: the collective divides by the ranks, instead of a pass over all gradients before it.
    """
    return DistributedDataParallelConfig(
        # False: gradients are accumulated and reduced in the parameters' type
        grad_reduce_in_fp32=cfg.parallel.grad_reduce_dtype == "fp32",
        use_distributed_optimizer=cfg.optimizer.distributed,
        overlap_grad_reduce=cfg.parallel.overlap_grad_reduce,
        bucket_size=cfg.parallel.grad_bucket_params or None,
        overlap_param_gather=cfg.parallel.overlap_param_gather,
        check_for_nan_in_grad=False,
        average_in_collective=average,
    )


def optimizer_config(cfg: RunConfig) -> OptimizerConfig:
    """AdamW with fp32 master weights when the parameters are bf16."""
    opt = cfg.optimizer
    return OptimizerConfig(
        optimizer="adam",
        lr=opt.lr,
        min_lr=opt.lr * opt.min_lr_ratio,
        weight_decay=opt.weight_decay,
        adam_beta1=opt.beta1,
        adam_beta2=opt.beta2,
        adam_eps=opt.eps,
        clip_grad=opt.clip_grad,
        bf16=cfg.train.precision == "bf16",
        params_dtype=DTYPES[cfg.train.precision],
        use_distributed_optimizer=opt.distributed,
        overlap_param_gather=cfg.parallel.overlap_param_gather,
        use_precision_aware_optimizer=fused_master_weights(cfg),
        store_param_remainders=False,  # megatron-core sees fp32, see train.remainders
    )


def fused_master_weights(cfg: RunConfig) -> bool:
    """Whether the settings ask for it and Transformer Engine, whose optimizer megatron-core then takes, is there."""
    return (
        cfg.masters_in_adam and torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None
    )
