"""config.json of an exported model: made from a ModelConfig, read back into one.

Plain dictionaries: neither direction imports transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from egmla_megatron.config.schema import ModelConfig
from egmla_megatron.errors import UserError

__all__ = ["AUTO_MAP", "EXPORTED_BY", "egmla_config", "hf_config", "model_config_from_hf", "require_keys"]

AUTO_MAP = {
    "AutoConfig": "configuration_egmla.EgmlaConfig",
    "AutoModel": "modeling_egmla.EgmlaModel",
    "AutoModelForCausalLM": "modeling_egmla.EgmlaForCausalLM",
}
EXPORTED_BY = "egmla_megatron"  # tells our exports from other models of the same class
# config.json key -> field of ModelConfig
_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
    "tie_word_embeddings": "tie_word_embeddings",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "kv_emb_dim": "kv_emb_dim",
    "gate": "gate",
    "gate_norm": "gate_norm",
    "kv_group_size": "kv_group_size",
    "rope_theta": "rope_theta",
    "rms_norm_eps": "rms_norm_eps",
    "gate_norm_eps": "gate_norm_eps",
    "initializer_range": "init_std",
    "gate_table_init_std": "gate_table_init_std",
    "attention_dropout": "attention_dropout",
}


def egmla_config(model: ModelConfig) -> dict[str, Any]:
    """The architecture's part of config.json, for latent attention with or without a gate."""
    return {
        "architectures": ["EgmlaForCausalLM"],
        "auto_map": dict(AUTO_MAP),
        "model_type": "egmla",
        **{key: getattr(model, field) for key, field in _KEYS.items()},
    }


def hf_config(architecture: Mapping[str, Any], *, dtype: str, token_ids: Mapping[str, int | None]) -> dict[str, Any]:
    """The contents of config.json.

    architecture: as `egmla_config` gives it. dtype: name of the weights' torch dtype. token_ids: bos_token_id,
    eos_token_id, pad_token_id where known.
    """
    return {**architecture, "dtype": dtype, **token_ids, "use_cache": True, "exported_by": EXPORTED_BY}


def require_keys(config: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Refuse a config.json that lacks keys, naming them."""
    missing = [key for key in keys if key not in config]
    if missing:
        raise UserError(f"config.json: missing {', '.join(missing)}; export the model again")


def model_config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The architecture that a config.json describes; missing keys are named."""
    config = {"tie_word_embeddings": True, **config}  # older releases leave out what every configuration defaults to
    require_keys(config, _KEYS)
    found = {field: config[key] for key, field in _KEYS.items()}
    return ModelConfig(**{**found, "q_lora_rank": found["q_lora_rank"] or 0})
