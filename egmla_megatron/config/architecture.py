"""What makes two models the same network: the fields a checkpoint must share with the configuration."""

from __future__ import annotations

import dataclasses
from typing import Any

from egmla_megatron.config.schema import ModelConfig

__all__ = ["architecture", "architecture_difference"]

# Names, initial values and dropout change neither a weight's shape nor the function that is computed.
_NEVER = {"name", "init_std", "gate_table_init_std", "attention_dropout", "hidden_dropout"}
_MLA_ONLY = {
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "kv_lora_rank",
    "kv_emb_dim",
    "gate",
    "gate_norm",
    "gate_norm_eps",
    "kv_group_size",
    "rope_theta",
}
_MHA_ONLY = {"max_position_embeddings"}  # rows of the learned positions; rotary positions have no rows
_GATE_ONLY = {"gate_norm", "gate_norm_eps"}


def architecture(model: ModelConfig) -> dict[str, Any]:
    """Returns the fields that change the weights' shapes or the function computed, and no others."""
    left_out = _NEVER | (_MLA_ONLY if model.attention == "mha" else _MHA_ONLY)
    if not model.gated:
        left_out = left_out | _GATE_ONLY
    elif not model.gate_norm:
        left_out = left_out | {"gate_norm_eps"}
    return {key: value for key, value in dataclasses.asdict(model).items() if key not in left_out}


def architecture_difference(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Returns one line per field in which checkpoint `a` and configuration `b` differ; empty when they agree."""
    absent = "(not used)"
    return [
        f"model.{key}: checkpoint {a.get(key, absent)}, configuration {b.get(key, absent)}"
        for key in dict.fromkeys([*a, *b])
        if a.get(key, absent) != b.get(key, absent)
    ]
