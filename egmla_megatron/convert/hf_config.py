"""config.json of an exported model: made from a ModelConfig, read back into one.

Plain dictionaries: neither direction imports transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from egmla_megatron.config.schema import ModelConfig
from egmla_megatron.errors import UserError

__all__ = ["AUTO_MAP", "hf_config", "model_config_from_hf", "read_hf_config"]

AUTO_MAP = {
    "AutoConfig": "configuration_egmla.EgmlaConfig",
    "AutoModel": "modeling_egmla.EgmlaModel",
    "AutoModelForCausalLM": "modeling_egmla.EgmlaForCausalLM",
}
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


def hf_config(model: ModelConfig, *, dtype: str, token_ids: Mapping[str, int]) -> dict[str, Any]:
    """The contents of config.json.

    dtype: name of the weights' torch dtype. token_ids: bos_token_id, eos_token_id, pad_token_id where known.
    """
    if model.attention != "mla":
        raise UserError(
            f"model.attention: got {model.attention!r}, allowed 'mla' in a Hugging Face export; "
            "the MHA baseline has no Hugging Face model code yet"
        )
    return {
        "architectures": ["EgmlaForCausalLM"],
        "auto_map": dict(AUTO_MAP),
        "model_type": "egmla",
        "dtype": dtype,
        **{key: getattr(model, field) for key, field in _KEYS.items()},
        **token_ids,
        "use_cache": True,
    }


def read_hf_config(hf_dir: str | Path) -> dict[str, Any]:
    """config.json of a folder; UserError when the folder holds no EG-MLA export."""
    path = Path(hf_dir) / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{hf_dir}: got no config.json, expected the folder of an exported model") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); export the model again") from error
    if config.get("model_type") != "egmla":
        raise UserError(f"{path}: model_type: got {config.get('model_type')!r}, allowed 'egmla'")
    return config


def model_config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The architecture that a config.json describes; missing keys are named."""
    missing = [key for key in _KEYS if key not in config]
    if missing:
        raise UserError(f"config.json: missing {', '.join(missing)}; export the model again")
    return ModelConfig(**{field: config[key] for key, field in _KEYS.items()})
