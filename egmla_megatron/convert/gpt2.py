"""The MHA baseline as GPT-2: transformers' own class computes the same, with the exact GELU.

GPT-2 keeps its linear weights transposed, [in, out], and q, k, v of all heads in one of them.

Shape legend: D hidden size, F intermediate size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from egmla_megatron.attention.reference import MHA_NORM_EPS
from egmla_megatron.config.schema import ModelConfig
from egmla_megatron.convert.hf_config import require_keys
from egmla_megatron.convert.names import WHOLE, Indexable, Row, Split, cut_qkv, join_qkv
from egmla_megatron.errors import UserError

__all__ = ["gpt2_config", "gpt2_table", "model_config_from_gpt2", "refuse_as_gpt2"]


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.T if tensor.dim() == 2 else tensor


def _cut_qkv(tensor: Indexable, model: ModelConfig) -> Iterator[Tensor]:
    return iter([_transposed(torch.cat(tuple(cut_qkv(tensor, model))))])


def _join_qkv(parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
    return join_qkv(_transposed(parts[0]).chunk(3), model)


TRANSPOSED = Split(
    "transposed", lambda tensor, model: iter([_transposed(tensor[:])]), lambda parts, model: _transposed(parts[0])
)
QKV_TRANSPOSED = Split("qkv_transposed", _cut_qkv, _join_qkv)

_LAYER = (  # Megatron's name, GPT-2's, how it is cut
    ("input_layernorm", "ln_1", WHOLE),
    ("self_attention.linear_qkv", "attn.c_attn", QKV_TRANSPOSED),
    ("self_attention.linear_proj", "attn.c_proj", TRANSPOSED),
    ("pre_mlp_layernorm", "ln_2", WHOLE),
    ("mlp.linear_fc1", "mlp.c_fc", TRANSPOSED),
    ("mlp.linear_fc2", "mlp.c_proj", TRANSPOSED),
)


def gpt2_table(model: ModelConfig) -> Iterator[Row]:
    """All rows of an MHA model, layer by layer."""
    yield Row("embedding.word_embeddings.weight", ("transformer.wte.weight",))
    yield Row("embedding.position_embeddings.weight", ("transformer.wpe.weight",))
    for layer in range(model.num_layers):
        for mcore, hf, split in _LAYER:
            for kind in ("weight", "bias"):
                yield Row(f"decoder.layers.{layer}.{mcore}.{kind}", (f"transformer.h.{layer}.{hf}.{kind}",), split)
    for kind in ("weight", "bias"):
        yield Row(f"decoder.final_layernorm.{kind}", (f"transformer.ln_f.{kind}",))
    if not model.tie_word_embeddings:
        yield Row("output_layer.weight", ("lm_head.weight",))


def refuse_as_gpt2(model: ModelConfig) -> None:
    """Refuse what GPT-2 cannot express."""
    if model.attention != "mha":
        raise UserError(f"layout: got gpt2 for model.attention={model.attention}, allowed mha; take layout egmla")


# config.json key -> the only value with which GPT-2 is our MHA model
_FIXED = {
    "activation_function": "gelu",
    "layer_norm_epsilon": MHA_NORM_EPS,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
}
_KEYS = {
    "vocab_size": "vocab_size",
    "n_embd": "hidden_size",
    "n_inner": "intermediate_size",
    "n_layer": "num_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "tie_word_embeddings": "tie_word_embeddings",
    "initializer_range": "init_std",
    "attn_pdrop": "attention_dropout",
    "resid_pdrop": "hidden_dropout",
}


def gpt2_config(model: ModelConfig) -> dict[str, Any]:
    """The architecture's part of config.json."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{key: getattr(model, field) for key, field in _KEYS.items()},
        "embd_pdrop": model.hidden_dropout,
        **_FIXED,
    }


def model_config_from_gpt2(config: Mapping[str, Any]) -> ModelConfig:
    """The MHA model that a config.json describes; UserError where GPT-2 is another model than ours."""
    config = {"tie_word_embeddings": True, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False} | {
        **config
    }
    require_keys(config, _KEYS)
    for key, value in _FIXED.items():
        if config.get(key) != value:
            raise UserError(
                f"config.json: {key}: got {config.get(key)!r}, allowed {value!r}: the MHA model of this project has no "
                "other; convert a model that was trained with it"
            )
    found: dict[str, Any] = {field: config[key] for key, field in _KEYS.items()}
    found["intermediate_size"] = found["intermediate_size"] or 4 * found["hidden_size"]
    heads = found["num_attention_heads"]
    return ModelConfig(attention="mha", gate="none", kv_emb_dim=0, v_head_dim=found["hidden_size"] // heads, **found)
