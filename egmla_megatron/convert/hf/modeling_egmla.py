"""EG-MLA language model for Hugging Face transformers 5, with a cache of latents.

A flat file: exported checkpoints carry it beside their weights; it needs torch, transformers and the
configuration and cache files next to it.

Each layer caches the normed latent and the rotated shared key. Keys and values of the heads are expanded from them
at every step, since gate and norm sit behind the up-projection and cannot be absorbed into the queries. The gate
depends on a token's id alone, so the cache keeps the ids once for all layers.

Shape suffixes: B batch, S new tokens, T all tokens, D hidden size, H heads, C latent, R rotary dims,
N position-free dims, V value dims, P = N + R, U = H * (N + V).
"""

import math

import torch
from torch import nn
from torch.nn import functional
from transformers import initialization as init
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel, slice_logits_to_keep
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .cache_egmla import EgmlaCache
from .configuration_egmla import EgmlaConfig

__all__ = ["EgmlaCache", "EgmlaForCausalLM", "EgmlaModel", "EgmlaPreTrainedModel", "EgmlaRMSNorm"]


class EgmlaRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight; the statistics are taken in fp32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rotary_angles(position_ids_BS: torch.Tensor, dims: int, theta: float) -> torch.Tensor:
    """Angles of the rotary pairs, fp32 [B, S, R / 2]: position * theta^(-2i / R)."""
    steps = torch.arange(0, dims, 2, device=position_ids_BS.device, dtype=torch.float32)
    return position_ids_BS.float().unsqueeze(-1) * theta ** (-steps / dims)


def rotate_pairs(x_BhSR: torch.Tensor, angles_BSr: torch.Tensor) -> torch.Tensor:
    """Turns the pairs (2i, 2i + 1) of the last dimension; in fp32, returned in the dtype of x."""
    cos, sin = angles_BSr.cos().unsqueeze(1), angles_BSr.sin().unsqueeze(1)
    even, odd = x_BhSR.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x_BhSR.dtype)


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Attention in plain matrix products with an additive mask; returns ([B, S, H, V], weights)."""
    scores_BHST = query @ key.transpose(-1, -2) * scaling
    if attention_mask is not None:
        scores_BHST = scores_BHST + attention_mask
    weights_BHST = scores_BHST.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    weights_BHST = functional.dropout(weights_BHST, p=dropout, training=module.training)
    return (weights_BHST @ value).transpose(1, 2).contiguous(), weights_BHST


class EgmlaGateTable(nn.Embedding):
    """Gating embedding of one layer; a class of its own for its own initial std."""


class EgmlaGateProjection(nn.Linear):
    """Projection of the gating embedding, initialised so that the gates have std 1."""


class EgmlaAttention(nn.Module):
    """Latent attention whose up-projected keys and values are gated by an embedding of the token id."""

    is_causal = True

    def __init__(self, config: EgmlaConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.cache_idx = layer_idx // config.kv_group_size
        self.heads = config.num_attention_heads
        self.scaling = 1 / math.sqrt(config.qk_head_dim)
        hidden = config.hidden_size
        kv_dim = self.heads * (config.qk_nope_head_dim + config.v_head_dim)
        if config.q_lora_rank:
            self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=False)
            self.q_a_layernorm = EgmlaRMSNorm(config.q_lora_rank, config.rms_norm_eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, self.heads * config.qk_head_dim, bias=False)
        else:
            self.q_proj = nn.Linear(hidden, self.heads * config.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, config.kv_lora_rank + config.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = EgmlaRMSNorm(config.kv_lora_rank, config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, kv_dim, bias=False)
        if config.gate != "none":
            self.gate_embed = EgmlaGateTable(config.vocab_size, config.kv_emb_dim)
            self.gate_proj = EgmlaGateProjection(config.kv_emb_dim, kv_dim, bias=False)
            if config.gate_norm:
                self.gate_norm = nn.LayerNorm(kv_dim, eps=config.gate_norm_eps)
        self.o_proj = nn.Linear(self.heads * config.v_head_dim, hidden, bias=False)

    def query(self, hidden_BSD, angles_BSr):
        """Queries of all heads [B, H, S, P]."""
        config = self.config
        if config.q_lora_rank:
            q_BSQ = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_BSD)))
        else:
            q_BSQ = self.q_proj(hidden_BSD)
        q_BHSP = q_BSQ.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q_BHSN, q_BHSR = q_BHSP.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        return torch.cat((q_BHSN, rotate_pairs(q_BHSR, angles_BSr)), dim=-1)

    def expand(self, latent_BTC, rope_key_BTR, ids_BT):
        """Gated keys [B, H, T, P] and values [B, H, T, V] of every cached token."""
        config = self.config
        kv_BTU = self.kv_b_proj(latent_BTC)
        if config.gate != "none":
            gate_BTU = self.gate_proj(self.gate_embed(ids_BT))
            kv_BTU = kv_BTU * gate_BTU if config.gate == "mul" else kv_BTU + gate_BTU
            kv_BTU = self.gate_norm(kv_BTU) if config.gate_norm else kv_BTU
        kv_BHTu = kv_BTU.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k_BHTN, v_BHTV = kv_BHTu.split([config.qk_nope_head_dim, config.v_head_dim], dim=-1)
        return torch.cat((k_BHTN, rope_key_BTR.unsqueeze(1).expand(-1, self.heads, -1, -1)), dim=-1), v_BHTV

    def forward(self, hidden_BSD, ids_BS, angles_BSr, attention_mask=None, cache=None, **kwargs):
        config = self.config
        down_BSd = self.kv_a_proj_with_mqa(hidden_BSD)
        latent, rope_key = down_BSd.split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        latent, rope_key = self.kv_a_layernorm(latent), rotate_pairs(rope_key.unsqueeze(1), angles_BSr).squeeze(1)
        ids_BT = ids_BS
        if cache is not None:
            latent, rope_key = cache.update(latent, rope_key, self.cache_idx)
            ids_BT = cache.token_ids_BT
        k_BHTP, v_BHTV = self.expand(latent, rope_key, ids_BT)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager_attention_forward)
        dropout = config.attention_dropout if self.training else 0.0
        q_BHSP = self.query(hidden_BSD, angles_BSr)
        out_BSHV, weights = attend(
            self, q_BHSP, k_BHTP, v_BHTV, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        return self.o_proj(out_BSHV.flatten(-2)), weights


class EgmlaMLP(nn.Module):
    """SwiGLU without biases."""

    def __init__(self, config: EgmlaConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class EgmlaDecoderLayer(GradientCheckpointingLayer):
    """Pre-norm block."""

    def __init__(self, config: EgmlaConfig, layer_idx: int):
        super().__init__()
        self.input_layernorm = EgmlaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = EgmlaAttention(config, layer_idx)
        self.post_attention_layernorm = EgmlaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = EgmlaMLP(config)

    def forward(self, hidden_BSD, ids_BS, angles_BSr, attention_mask=None, cache=None, **kwargs):
        attended, _ = self.self_attn(
            self.input_layernorm(hidden_BSD), ids_BS, angles_BSr, attention_mask=attention_mask, cache=cache, **kwargs
        )
        hidden_BSD = hidden_BSD + attended
        return hidden_BSD + self.mlp(self.post_attention_layernorm(hidden_BSD))


class EgmlaPreTrainedModel(PreTrainedModel):
    """What both heads share: names, capabilities and the initial weights."""

    config_class = EgmlaConfig
    config: EgmlaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["EgmlaDecoderLayer"]  # noqa: RUF012
    _supports_sdpa = True
    _can_record_outputs = {"hidden_states": EgmlaDecoderLayer, "attentions": EgmlaAttention}  # noqa: RUF012

    def _init_weights(self, module):
        table_std = self.config.gate_table_init_std
        if isinstance(module, EgmlaGateTable):
            init.normal_(module.weight, mean=0.0, std=table_std)
        elif isinstance(module, EgmlaGateProjection):
            init.normal_(module.weight, mean=0.0, std=1 / (table_std * math.sqrt(self.config.kv_emb_dim)))
        else:
            super()._init_weights(module)


class EgmlaModel(EgmlaPreTrainedModel):
    """Embedding, blocks and final norm."""

    def __init__(self, config: EgmlaConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(EgmlaDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = EgmlaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    @deprecate_kwarg("past_key_values", "6.0.0", new_name="cache")
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        cache=None,
        inputs_embeds=None,
        use_cache=None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        if input_ids is None:
            raise ValueError("EG-MLA needs input_ids: gates are looked up by token id (inputs_embeds may come on top)")
        if cache is None and use_cache:
            cache = EgmlaCache(self.config)
        if cache is not None and not isinstance(cache, EgmlaCache):
            raise TypeError(f"cache: got {type(cache).__name__}, allowed EgmlaCache(model.config)")
        hidden_BSD = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            start = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(start, start + input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        mask = create_causal_mask(self.config, hidden_BSD, attention_mask, cache=cache, position_ids=position_ids)
        angles_BSr = rotary_angles(position_ids, self.config.qk_rope_head_dim, self.config.rope_theta)
        if cache is not None:
            cache.append_ids(input_ids)
        for layer in self.layers:
            hidden_BSD = layer(hidden_BSD, input_ids, angles_BSr, attention_mask=mask, cache=cache, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_BSD), cache=cache)


class EgmlaForCausalLM(EgmlaPreTrainedModel, GenerationMixin):
    """Language model with a (by default tied) head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: EgmlaConfig):
        super().__init__(config)
        self.model = EgmlaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        """`generate` gets the latent cache instead of the library's cache of keys and values."""
        if model_kwargs.get("cache") is not None or generation_config.use_cache is False:
            return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        if generation_config.cache_implementation not in (None, "dynamic"):
            kind = generation_config.cache_implementation
            raise ValueError(f"cache_implementation: got {kind!r}, allowed none: EG-MLA brings its own latent cache")
        model_kwargs["cache"] = EgmlaCache(self.config)
        return None

    @can_return_tuple
    @deprecate_kwarg("past_key_values", "6.0.0", new_name="cache")
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        cache=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
