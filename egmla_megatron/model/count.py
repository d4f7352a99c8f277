"""Parameters, cache size and floating-point operations of a model, from its configuration alone.

The counts are exact for the weights that `model/build.py` makes; no torch is imported. Active parameters
are all but the gating tables: a token reads one row of each table and multiplies with none of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from egmla_megatron.config.schema import ModelConfig

__all__ = ["FlopCount", "ParameterCount", "count_parameters", "flops_per_token", "kv_cache_elements_per_token"]

_BACKWARD_PER_FORWARD = 2  # one GEMM for the input's gradient, one for the weight's


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters. `by_part` sums to `total`; a part covers all layers."""

    active: int
    gate_tables: int
    total: int
    by_part: dict[str, int]


@dataclass(frozen=True)
class FlopCount:
    """Floating-point operations per token, a multiply-add counted as two. `by_part` sums to `forward`."""

    forward: int
    forward_backward: int
    by_part: dict[str, int]


def count_parameters(model: ModelConfig) -> ParameterCount:
    """Counts every trained parameter of `model` by part."""
    per_layer = _mha_layer(model) if model.attention == "mha" else _mla_layer(model)
    parts = {"embedding": model.vocab_size * model.hidden_size}
    if model.attention == "mha":
        parts["position_embedding"] = model.max_position_embeddings * model.hidden_size
    parts |= {name: model.num_layers * size for name, size in per_layer.items() if size}
    parts["final_norm"] = _norm(model)
    if not model.tie_word_embeddings:
        parts["output_head"] = model.vocab_size * model.hidden_size
    tables = parts.get("gate_tables", 0)
    total = sum(parts.values())
    return ParameterCount(active=total - tables, gate_tables=tables, total=total, by_part=parts)


def kv_cache_elements_per_token(model: ModelConfig) -> int:
    """Returns the cached elements per token over all layers: latent and shared RoPE key, or all keys and values."""
    if model.attention == "mha":
        return model.num_layers * 2 * model.num_attention_heads * model.v_head_dim
    return model.num_layers * (model.kv_lora_rank + model.qk_rope_head_dim)


def flops_per_token(model: ModelConfig, seq_length: int) -> FlopCount:
    """Counts the operations of one token in a sequence of `seq_length`, averaged over the positions.

    Counted: every GEMM with the gate projection and the output head, and causal attention over the
    (seq_length + 1) / 2 positions that a token sees on average. Not counted: table look-ups and elementwise
    work. The gate projection counts once per token, whether or not repeated tokens share one product.
    """
    per_layer = _mha_gemms(model) if model.attention == "mha" else _mla_gemms(model)
    parts = {name: 2 * model.num_layers * weights for name, weights in per_layer.items() if weights}
    # QK^T and PV: 2 operations per element and visible position, (seq_length + 1) / 2 positions.
    parts["attention_scores"] = model.num_layers * model.num_attention_heads * _head_elements(model) * (seq_length + 1)
    parts["output_head"] = 2 * model.vocab_size * model.hidden_size
    forward = sum(parts.values())
    return FlopCount(forward=forward, forward_backward=(1 + _BACKWARD_PER_FORWARD) * forward, by_part=parts)


def _head_elements(model: ModelConfig) -> int:
    """Elements of one head that a (query, key) pair touches: the key dimension plus the value dimension."""
    if model.attention == "mha":
        return 2 * model.v_head_dim
    return model.qk_nope_head_dim + model.qk_rope_head_dim + model.v_head_dim


def _norm(model: ModelConfig) -> int:
    """Parameters of one norm of the residual stream: LayerNorm has a bias, RMSNorm has none."""
    return model.hidden_size * (2 if model.attention == "mha" else 1)


def _mla_gemms(model: ModelConfig) -> dict[str, int]:
    """Weights of one layer's GEMMs."""
    heads, hidden = model.num_attention_heads, model.hidden_size
    q_width = heads * (model.qk_nope_head_dim + model.qk_rope_head_dim)
    kv_width = heads * (model.qk_nope_head_dim + model.v_head_dim)
    q_rank = model.q_lora_rank
    return {
        "q_projection": q_rank * (hidden + q_width) if q_rank else hidden * q_width,
        "kv_down_projection": hidden * (model.kv_lora_rank + model.qk_rope_head_dim),
        "kv_up_projection": model.kv_lora_rank * kv_width,
        "gate_projection": model.kv_emb_dim * kv_width if model.gated else 0,
        "output_projection": heads * model.v_head_dim * hidden,
        "mlp": 3 * hidden * model.intermediate_size,
    }


def _mla_layer(model: ModelConfig) -> dict[str, int]:
    """Parameters of one layer: its GEMMs, its norms, its gating table."""
    kv_width = model.num_attention_heads * (model.qk_nope_head_dim + model.v_head_dim)
    return _mla_gemms(model) | {
        "norms": 2 * _norm(model) + model.q_lora_rank + model.kv_lora_rank,
        "gate_norm": 2 * kv_width if model.gated and model.gate_norm else 0,
        "gate_tables": model.vocab_size * model.kv_emb_dim if model.gated else 0,
    }


def _mha_gemms(model: ModelConfig) -> dict[str, int]:
    """Weights of one layer's GEMMs."""
    width = model.num_attention_heads * model.v_head_dim
    return {
        "qkv_projection": model.hidden_size * 3 * width,
        "output_projection": width * model.hidden_size,
        "mlp": 2 * model.hidden_size * model.intermediate_size,
    }


def _mha_layer(model: ModelConfig) -> dict[str, int]:
    """Parameters of one layer: its GEMMs, their biases, its norms."""
    width = model.num_attention_heads * model.v_head_dim
    return _mha_gemms(model) | {
        "biases": 3 * width + model.hidden_size + model.intermediate_size + model.hidden_size,
        "norms": 2 * _norm(model),
    }
