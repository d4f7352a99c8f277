"""The layers of EG-MLA for Hugging Face transformers: norm, gated latent attention, SwiGLU, block.

A flat file: exported checkpoints carry it beside their weights.

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
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention_egmla import GATES, attend, rotate_pairs
from .configuration_egmla import EgmlaConfig
from .gates_egmla import EgmlaFinishedGates

__all__ = ["EgmlaAttention", "EgmlaDecoderLayer", "EgmlaGateProjection", "EgmlaGateTable", "EgmlaMLP", "EgmlaRMSNorm"]


class EgmlaRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight; the statistics are taken in fp32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


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
        self.layer_idx = layer_idx
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
            if config.gate not in GATES:
                raise ValueError(f"gate: got {config.gate!r}, allowed none, {', '.join(GATES)}")
            self.combine = GATES[config.gate]
            self.finished_gates: EgmlaFinishedGates | None = None  # see precompute_gates
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

    @torch.no_grad()
    def resize_gate_table(self, rows):
        """Cuts the gating table to `rows` token ids or adds some, which get the mean of the others."""
        if self.config.gate == "none":
            return
        old = self.gate_embed.weight
        mean = old.mean(dim=0, keepdim=True, dtype=torch.float32).to(old.dtype)
        added = mean.expand(max(0, rows - old.shape[0]), -1)
        self.gate_embed.weight = nn.Parameter(torch.cat((old[:rows], added)), requires_grad=old.requires_grad)
        self.gate_embed.num_embeddings = rows

    def precompute_gates(self, on_host):
        """Puts finished gates in the place of table and projection; returns them."""
        self.finished_gates = EgmlaFinishedGates(self.gate_embed, self.gate_proj, on_host)
        del self.gate_embed, self.gate_proj
        return self.finished_gates

    def gates(self, ids_BT, fetch):
        """Gates [B, T, U] of tokens: computed, looked up, or fetched from host memory."""
        if fetch is not None:
            return fetch.take(self.layer_idx, ids_BT.device)
        if self.finished_gates is not None:
            return self.finished_gates(ids_BT)
        return self.gate_proj(self.gate_embed(ids_BT))

    def expand(self, latent_BTC, rope_key_BTR, ids_BT, fetch=None):
        """Gated keys [B, H, T, P] and values [B, H, T, V] of every cached token."""
        config = self.config
        kv_BTU = self.kv_b_proj(latent_BTC)
        if config.gate != "none":
            kv_BTU = self.combine(kv_BTU, self.gates(ids_BT, fetch))
            kv_BTU = self.gate_norm(kv_BTU) if config.gate_norm else kv_BTU
        kv_BHTu = kv_BTU.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k_BHTN, v_BHTV = kv_BHTu.split([config.qk_nope_head_dim, config.v_head_dim], dim=-1)
        return torch.cat((k_BHTN, rope_key_BTR.unsqueeze(1).expand(-1, self.heads, -1, -1)), dim=-1), v_BHTV

    def forward(self, hidden_BSD, ids_BS, angles_BSr, attention_mask=None, cache=None, with_weights=False, fetch=None):
        config = self.config
        down_BSd = self.kv_a_proj_with_mqa(hidden_BSD)
        latent, rope_key = down_BSd.split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        latent, rope_key = self.kv_a_layernorm(latent), rotate_pairs(rope_key.unsqueeze(1), angles_BSr).squeeze(1)
        ids_BT = ids_BS
        if cache is not None:
            latent, rope_key = cache.update(latent, rope_key, self.cache_idx)
            ids_BT = cache.token_ids_BT.to(latent.device)  # layers may be spread over devices
        k_BHTP, v_BHTV = self.expand(latent, rope_key, ids_BT, fetch)
        dropout = config.attention_dropout if self.training else 0.0
        q_BHSP = self.query(hidden_BSD, angles_BSr)
        out_BSHV, weights = attend(q_BHSP, k_BHTP, v_BHTV, attention_mask, self.scaling, dropout, with_weights)
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

    def forward(self, hidden_BSD, ids_BS, angles_BSr, attention_mask=None, cache=None, with_weights=False, fetch=None):
        attended, weights = self.self_attn(
            self.input_layernorm(hidden_BSD), ids_BS, angles_BSr, attention_mask, cache, with_weights, fetch
        )
        hidden_BSD = hidden_BSD + attended
        return hidden_BSD + self.mlp(self.post_attention_layernorm(hidden_BSD)), weights
