"""Plain MLA as DeepSeek-V3 with dense layers only: transformers' own class computes the same.

The names of the tensors are the project's own. The class keeps expanded keys and values in its cache, not latents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from egmla_megatron.config.schema import ModelConfig
from egmla_megatron.convert.hf_config import require_keys
from egmla_megatron.errors import UserError

__all__ = ["deepseek_v3_config", "model_config_from_deepseek_v3", "refuse_as_deepseek_v3"]

_LATENT_NORM_EPS = 1e-6  # of the norms on latents, whatever rms_norm_eps says
_FIXED = {  # config.json key -> the only value with which the class is our MLA model
    "attention_bias": False,
    "hidden_act": "silu",
    "rope_interleave": True,
    "rope_scaling": None,
}
_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
    "tie_word_embeddings": "tie_word_embeddings",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "rms_norm_eps": "rms_norm_eps",
    "initializer_range": "init_std",
    "attention_dropout": "attention_dropout",
}


def refuse_as_deepseek_v3(model: ModelConfig) -> None:
    """Refuse what the class would compute otherwise."""
    if model.attention != "mla" or model.gated:
        what = f"gate={model.gate}" if model.attention == "mla" else f"attention={model.attention}"
        raise UserError(f"layout: got deepseek_v3 for model.{what}, allowed plain MLA; leave --layout out")
    if model.rms_norm_eps != _LATENT_NORM_EPS:
        raise UserError(
            f"layout: transformers' DeepSeek-V3 has eps {_LATENT_NORM_EPS:g} in the norms of its latents, got "
            f"model.rms_norm_eps={model.rms_norm_eps:g}, which it would not compute; take layout egmla"
        )
    if model.kv_group_size != 1:
        raise UserError(f"layout: got deepseek_v3 for model.kv_group_size={model.kv_group_size}, allowed 1")


def deepseek_v3_config(model: ModelConfig) -> dict[str, Any]:
    """The architecture's part of config.json."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **{key: getattr(model, field) for key, field in _KEYS.items()},
        **_FIXED,
        "q_lora_rank": model.q_lora_rank or None,
        "num_key_value_heads": model.num_attention_heads,
        "first_k_dense_replace": model.num_layers,
        "num_nextn_predict_layers": 0,
        "rope_theta": model.rope_theta,  # until transformers 4.57, then:
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
    }


def model_config_from_deepseek_v3(config: Mapping[str, Any]) -> ModelConfig:
    """The MLA model that a config.json describes; UserError where the class is another model than ours."""
    require_keys(config, [*_KEYS, "first_k_dense_replace"])
    rope = config.get("rope_parameters") or {"rope_type": "default", "rope_theta": config.get("rope_theta", 10000.0)}
    if rope.get("rope_type", "default") != "default":
        raise UserError(f"config.json: rope_parameters: got {rope}, allowed rope_type default")
    for key, value in _FIXED.items():
        if (config.get(key) if key == "rope_scaling" else config.get(key, value)) != value:
            raise UserError(f"config.json: {key}: got {config[key]!r}, allowed {value!r}; this project has no other")
    dense, layers = config["first_k_dense_replace"], config["num_hidden_layers"]
    if dense < layers:
        raise UserError(
            f"config.json: first_k_dense_replace: got {dense} of {layers} layers, allowed all: no experts here"
        )
    found: dict[str, Any] = {field: config[key] for key, field in _KEYS.items()}
    model = ModelConfig(
        gate="none",
        kv_emb_dim=0,
        q_lora_rank=config.get("q_lora_rank") or 0,
        rope_theta=float(rope["rope_theta"]),
        **found,
    )
    refuse_as_deepseek_v3(model)
    return model
