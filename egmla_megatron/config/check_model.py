"""Rules that a model obeys whatever it runs on."""

from __future__ import annotations

from egmla_megatron.config.schema import ModelConfig
from egmla_megatron.config.workable import nearest_divisor, refuse

__all__ = ["check_model"]


def check_model(model: ModelConfig) -> None:
    """Raises UserError when `model` describes no network that this package can build."""
    _check_sizes(model)
    if model.attention == "mha":
        _check_mha(model)
    else:
        _check_mla(model)


def _check_sizes(model: ModelConfig) -> None:
    names = ["num_layers", "hidden_size", "num_attention_heads", "intermediate_size", "v_head_dim", "vocab_size"]
    names += ["max_position_embeddings", "kv_group_size"]
    if model.attention == "mla":
        names += ["qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank"]
    for name in names:
        if getattr(model, name) < 1:
            refuse(f"model.{name}", getattr(model, name), "at least 1", f"set model.{name} to a positive size")
    for name in ("q_lora_rank", "kv_emb_dim"):
        if getattr(model, name) < 0:
            refuse(f"model.{name}", getattr(model, name), "0 (off) or more", f"set model.{name}=0")


def _check_mla(model: ModelConfig) -> None:
    if model.kv_group_size != 1:
        fix = "set model.kv_group_size=1"
        refuse("model.kv_group_size: layer groups are not implemented yet", model.kv_group_size, "1", fix)
    if model.qk_rope_head_dim % 2:
        refuse(
            "model.qk_rope_head_dim: rotary positions turn pairs of elements",
            model.qk_rope_head_dim,
            "even sizes",
            f"set model.qk_rope_head_dim={model.qk_rope_head_dim + 1}",
        )
    if model.gate == "none" and model.kv_emb_dim:
        fix = "set model.kv_emb_dim=0, or model.gate=mul"
        refuse("model.kv_emb_dim: a model without a gate has no gating tables", model.kv_emb_dim, "0", fix)
    if model.gate != "none" and not model.kv_emb_dim:
        fix = "set model.kv_emb_dim (the paper's Base uses 256), or model.gate=none"
        refuse(f"model.kv_emb_dim: gate {model.gate} reads gating tables", 0, "at least 1", fix)


def _check_mha(model: ModelConfig) -> None:
    unused = {"gate": "none", "kv_emb_dim": 0, "q_lora_rank": 0, "kv_group_size": 1}
    for name, value in unused.items():
        if getattr(model, name) != value:
            fix = f"set model.{name}={value}, or model.attention=mla"
            refuse(f"model.{name} has no meaning for model.attention=mha", getattr(model, name), f"{value}", fix)
    heads, hidden = model.num_attention_heads, model.hidden_size
    if hidden % heads:
        refuse(
            f"model.num_attention_heads does not divide model.hidden_size = {hidden}",
            heads,
            f"divisors of {hidden}",
            f"set model.num_attention_heads={nearest_divisor(heads, hidden)}",
        )
    if model.v_head_dim != hidden // heads:
        refuse(
            "model.v_head_dim is not model.hidden_size / model.num_attention_heads (model.attention=mha)",
            model.v_head_dim,
            f"{hidden // heads}",
            f"set model.v_head_dim={hidden // heads}",
        )
