"""The layer specs: which module sits in which slot of megatron-core's transformer layer.

Plug EG-MLA into your own model:  `ModuleSpec = layer_spec(config, implementation)`  with an
`EGMLATransformerConfig`, and pass the gate embeddings as `context` (see `model.build.EGMLAModel`).
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_submodules,
    get_gpt_layer_with_transformer_engine_submodules,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer

from egmla_megatron.attention.core_attention import TorchCoreAttention
from egmla_megatron.attention.gated_kv_up import GatedKVUp
from egmla_megatron.attention.layer import EGMLASelfAttention, EGMLATransformerLayer, MLATransformerLayer
from egmla_megatron.attention.norms import LatentNorm, TorchLayerNorm, TorchRMSNorm
from egmla_megatron.errors import UserError

__all__ = ["block_spec", "choose_implementation", "choose_kernels", "layer_spec"]


def _missing(package: str) -> str:
    """Why a package for GPUs cannot be used here; empty when it can."""
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    return "" if torch.cuda.is_available() else "no CUDA device"


def choose_implementation(name: str) -> str:
    """Resolve `parallel.implementation`: auto means Transformer Engine where it can run.

    Raises:
        UserError: te asked for and not importable, or no GPU.
    """
    missing = _missing("transformer_engine")
    if name == "auto":
        return "torch" if missing else "te"
    if name == "te" and missing:
        raise UserError(f"parallel.implementation=te: {missing}; use torch, or install the extra 'te' on a GPU machine")
    return name


def choose_kernels(name: str) -> str:
    """Resolve `parallel.kernels`: auto means triton where it can run.

    Raises:
        UserError: triton asked for and not importable, or no GPU.
    """
    missing = _missing("triton")
    if name == "auto":
        return "torch" if missing else "triton"
    if name == "triton" and missing:
        raise UserError(f"parallel.kernels: got triton, but {missing}; allowed: torch; use parallel.kernels=auto")
    return name


def _mha_spec(config: Any, implementation: str) -> ModuleSpec:
    if implementation == "te":
        return ModuleSpec(module=TransformerLayer, submodules=get_gpt_layer_with_transformer_engine_submodules())
    submodules = get_gpt_layer_local_submodules(normalization="LayerNorm")
    attention = submodules.self_attention
    attention = replace(attention, submodules=replace(attention.submodules, core_attention=TorchCoreAttention))
    submodules = replace(
        submodules, self_attention=attention, input_layernorm=TorchLayerNorm, pre_mlp_layernorm=TorchLayerNorm
    )
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def _mla_parts(implementation: str) -> tuple[Any, type, Any, dict[str, Any]]:
    """(layer submodules, column-parallel linear, norm, replacements in the attention's submodules)."""
    # one name in checkpoints, whoever wrote them: Transformer Engine can keep this norm inside the linear layer
    keys = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    if implementation == "te":
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

        layer = get_gpt_layer_with_transformer_engine_submodules(
            multi_latent_attention=True, qk_layernorm=False, use_te_activation_func=True
        )
        # a norm of its own can add the residual's gradient in its backward pass, as that of the attention does
        mlp = replace(layer.mlp.keywords["submodules"], linear_fc1=TEColumnParallelLinear)
        layer = replace(
            layer,
            pre_mlp_layernorm=layer.input_layernorm,
            mlp=partial(layer.mlp.func, submodules=mlp),
            sharded_state_dict_keys_map=keys,
        )
        return layer, TEColumnParallelLinear, TENorm, {}
    layer = get_gpt_layer_local_submodules(multi_latent_attention=True, normalization="RMSNorm")
    layer = replace(
        layer,
        input_layernorm=TorchRMSNorm,
        pre_mlp_layernorm=TorchRMSNorm,
        sharded_state_dict_keys_map=keys,
    )
    return layer, ColumnParallelLinear, TorchRMSNorm, {"core_attention": TorchCoreAttention}


def layer_spec(config: Any, implementation: str) -> ModuleSpec:
    """The spec of one layer for an `EGMLATransformerConfig` (EG-MLA or, with gate none, plain MLA) or MHA.

    Args:
        implementation: "te" or "torch".
    """
    if not config.multi_latent_attention:
        return _mha_spec(config, implementation)
    layer, column_linear, norm, replaced = _mla_parts(implementation)
    gated = config.gate != "none"
    up = ModuleSpec(module=GatedKVUp, params={"up": column_linear}) if gated else column_linear
    attention = replace(
        layer.self_attention,
        module=EGMLASelfAttention,
        submodules=replace(
            layer.self_attention.submodules,
            linear_q_up_proj=column_linear,
            linear_kv_up_proj=up,
            q_layernorm=norm if config.q_lora_rank else IdentityOp,
            kv_layernorm=LatentNorm if config.triton_kernels else norm,
            **replaced,
        ),
    )
    module = EGMLATransformerLayer if gated else MLATransformerLayer
    return ModuleSpec(module=module, submodules=replace(layer, self_attention=attention))


def block_spec(
    config: Any, implementation: str, pp_rank: int, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Specs of all layers of this pipeline stage, or of its chunk `vp_stage`, and of the final norm."""
    spec = layer_spec(config, implementation)
    if implementation == "te":
        from megatron.core.extensions.transformer_engine import TENorm

        norm: Any = TENorm
    else:
        norm = TorchRMSNorm if config.normalization == "RMSNorm" else TorchLayerNorm
    count = get_num_layers_to_build(config, vp_stage, pp_rank)
    return TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=norm)
