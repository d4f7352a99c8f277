"""The oracle: EG-MLA, plain MLA and the MHA baseline in plain torch, written for clarity.

Everything else in this project is compared with this file: the Megatron layers, the exported Hugging Face
model and the kernels. It knows neither parallelism nor caches, fused kernels nor dropout, and it computes in the
dtype of its parameters (use fp32 or fp64).

Parameter names of `ReferenceModel` are the project's Hugging Face names, so `load_state_dict` takes an exported
state dict as it is. Source of the formula: the paper's appendix C, equations 1-14, and the listing in appendix E.

Shape suffixes: B batch, S tokens, D hidden size, H heads, C latent (kv_lora_rank), R RoPE dims, N position-free
dims per head, V value dims per head, E gating embedding, P = N + R dims of a query or key, F intermediate,
U = H * (N + V) up-projected key/value dims, W words of the vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from egmla_megatron.config.schema import ModelConfig
from egmla_megatron.errors import UserError

__all__ = ["MHA_NORM_EPS", "ReferenceAttention", "ReferenceModel", "rotate_interleaved"]

MHA_NORM_EPS = 1e-5  # GPT-2's LayerNorm epsilon


def rotate_interleaved(x_BSHR: Tensor, theta: float, positions_BS: Tensor | None = None) -> Tensor:
    """Rotary embedding of the pairs (2i, 2i + 1), DeepSeek's convention.

    Pair i at position p turns by p * theta^(-2i / R) radians. x_BSHR: [B, S, heads, R], R even.
    positions_BS: positions of the tokens, default 0, 1, ..., S - 1.
    """
    dims = x_BSHR.shape[-1]
    if positions_BS is None:
        positions_BS = torch.arange(x_BSHR.shape[1], device=x_BSHR.device).unsqueeze(0)
    exponents = torch.arange(0, dims, 2, device=x_BSHR.device, dtype=torch.float64) / dims
    angle_BSr = positions_BS.to(torch.float64).unsqueeze(-1) * theta**-exponents
    cos_BS1r = angle_BSr.cos().to(x_BSHR.dtype).unsqueeze(2)
    sin_BS1r = angle_BSr.sin().to(x_BSHR.dtype).unsqueeze(2)
    even, odd = x_BSHR[..., 0::2], x_BSHR[..., 1::2]
    turned = torch.stack((even * cos_BS1r - odd * sin_BS1r, even * sin_BS1r + odd * cos_BS1r), dim=-1)
    return turned.flatten(-2)


def causal_attention(q_BSHP: Tensor, k_BSHP: Tensor, v_BSHV: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(P)) v over the positions up to the query's own; returns [B, S, H * V]."""
    scores_BHST = torch.einsum("bshp,bthp->bhst", q_BSHP, k_BSHP) / math.sqrt(q_BSHP.shape[-1])
    length = q_BSHP.shape[1]
    future = torch.ones(length, length, dtype=torch.bool, device=q_BSHP.device).triu(diagonal=1)
    weights_BHST = scores_BHST.masked_fill(future, float("-inf")).softmax(dim=-1)
    return torch.einsum("bhst,bthv->bshv", weights_BHST, v_BSHV).flatten(-2)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class ReferenceAttention(nn.Module):
    """One attention layer of EG-MLA, or of plain MLA with `gate: none` (appendix C, equations 1-14).

    forward(x_BSD, ids_BS) -> y_BSD, where x is the already normed hidden state and ids are the token ids.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        if model.kv_group_size != 1:
            raise UserError(f"model.kv_group_size: got {model.kv_group_size}, allowed 1 (no layer groups yet); set 1")
        if model.gate not in ("none", "mul", "add"):  # written out: an oracle shares no table with what it judges
            raise UserError(f"model.gate: got {model.gate!r}, allowed mul, add, none; teach gated_kv the new one")
        self.model = model
        heads = model.num_attention_heads
        qk_dim = model.qk_nope_head_dim + model.qk_rope_head_dim
        kv_dim = heads * (model.qk_nope_head_dim + model.v_head_dim)
        if model.q_lora_rank:
            self.q_a_proj = nn.Linear(model.hidden_size, model.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(model.q_lora_rank, model.rms_norm_eps)
            self.q_b_proj = nn.Linear(model.q_lora_rank, heads * qk_dim, bias=False)
        else:
            self.q_proj = nn.Linear(model.hidden_size, heads * qk_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(model.hidden_size, model.kv_lora_rank + model.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(model.kv_lora_rank, model.rms_norm_eps)
        self.kv_b_proj = nn.Linear(model.kv_lora_rank, kv_dim, bias=False)
        if model.gated:
            self.gate_embed = nn.Embedding(model.vocab_size, model.kv_emb_dim)
            self.gate_proj = nn.Linear(model.kv_emb_dim, kv_dim, bias=False)
            if model.gate_norm:
                self.gate_norm = nn.LayerNorm(kv_dim, eps=model.gate_norm_eps)
        self.o_proj = nn.Linear(heads * model.v_head_dim, model.hidden_size, bias=False)

    def queries(self, x_BSD: Tensor) -> Tensor:
        """[q^C ; RoPE(q^R)] of every head: [B, S, H, P] (equations 7-9, 11)."""
        model = self.model
        q_BSQ = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BSD))) if model.q_lora_rank else self.q_proj(x_BSD)
        q_BSHP = q_BSQ.unflatten(-1, (model.num_attention_heads, -1))
        q_BSHN, q_BSHR = q_BSHP.split([model.qk_nope_head_dim, model.qk_rope_head_dim], dim=-1)
        return torch.cat((q_BSHN, rotate_interleaved(q_BSHR, model.rope_theta)), dim=-1)

    def gated_kv(self, c_BSC: Tensor, ids_BS: Tensor) -> Tensor:
        """Up-projected, gated and normed keys and values: [B, S, U] (equations 2-5).

        c_BSC is the raw latent. The LayerNorm spans all heads at once.
        """
        kv_BSU = self.kv_b_proj(self.kv_a_layernorm(c_BSC))
        if self.model.gate == "none":
            return kv_BSU
        gate_BSU = self.gate_proj(self.gate_embed(ids_BS))
        if self.model.gate == "mul":
            kv_BSU = kv_BSU * gate_BSU
        elif self.model.gate == "add":
            kv_BSU = kv_BSU + gate_BSU
        else:
            raise UserError(f"model.gate: got {self.model.gate!r}, allowed mul, add")
        return self.gate_norm(kv_BSU) if self.model.gate_norm else kv_BSU

    def forward(self, x_BSD: Tensor, ids_BS: Tensor) -> Tensor:
        """x_BSD: normed hidden state, ids_BS: token ids -> attention output [B, S, D] (before the residual)."""
        model = self.model
        down_BSd = self.kv_a_proj_with_mqa(x_BSD)
        c_BSC, k_BSR = down_BSd.split([model.kv_lora_rank, model.qk_rope_head_dim], dim=-1)
        k_BS1R = rotate_interleaved(k_BSR.unsqueeze(2), model.rope_theta)
        kv_BSHu = self.gated_kv(c_BSC, ids_BS).unflatten(-1, (model.num_attention_heads, -1))
        k_BSHN, v_BSHV = kv_BSHu.split([model.qk_nope_head_dim, model.v_head_dim], dim=-1)
        k_BSHP = torch.cat((k_BSHN, k_BS1R.expand(-1, -1, model.num_attention_heads, -1)), dim=-1)
        return self.o_proj(causal_attention(self.queries(x_BSD), k_BSHP, v_BSHV))


class ReferenceMHA(nn.Module):
    """Multi-head attention with biases, the GPT-2 shape; the ids argument is not used."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.heads = model.num_attention_heads
        inner = self.heads * model.v_head_dim
        self.q_proj = nn.Linear(model.hidden_size, inner)
        self.k_proj = nn.Linear(model.hidden_size, inner)
        self.v_proj = nn.Linear(model.hidden_size, inner)
        self.o_proj = nn.Linear(inner, model.hidden_size)

    def forward(self, x_BSD: Tensor, ids_BS: Tensor) -> Tensor:
        """x_BSD -> attention output [B, S, D]."""
        del ids_BS
        q, k, v = (proj(x_BSD).unflatten(-1, (self.heads, -1)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(causal_attention(q, k, v))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), without biases."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(model.hidden_size, model.intermediate_size, bias=False)
        self.up_proj = nn.Linear(model.hidden_size, model.intermediate_size, bias=False)
        self.down_proj = nn.Linear(model.intermediate_size, model.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD))


class GeluMLP(nn.Module):
    """down(gelu(up(x))) with biases and the exact (erf) GELU."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(model.hidden_size, model.intermediate_size)
        self.down_proj = nn.Linear(model.intermediate_size, model.hidden_size)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down_proj(functional.gelu(self.up_proj(x_BSD)))


def hidden_norm(model: ModelConfig) -> nn.Module:
    """The norm of the residual stream: RMSNorm, or LayerNorm for the MHA baseline."""
    if model.attention == "mha":
        return nn.LayerNorm(model.hidden_size, eps=MHA_NORM_EPS)
    return RMSNorm(model.hidden_size, model.rms_norm_eps)


class ReferenceBlock(nn.Module):
    """Pre-norm block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = hidden_norm(model)
        self.self_attn = ReferenceMHA(model) if model.attention == "mha" else ReferenceAttention(model)
        self.post_attention_layernorm = hidden_norm(model)
        self.mlp = GeluMLP(model) if model.attention == "mha" else SwiGLU(model)

    def forward(self, x_BSD: Tensor, ids_BS: Tensor) -> Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), ids_BS)
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))


class ReferenceBackbone(nn.Module):
    """Embedding, blocks and final norm: ids_BS -> hidden states [B, S, D]."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(model.vocab_size, model.hidden_size)
        self.embed_positions: nn.Embedding | None = None
        if model.attention == "mha":
            self.embed_positions = nn.Embedding(model.max_position_embeddings, model.hidden_size)
        self.layers = nn.ModuleList(ReferenceBlock(model) for _ in range(model.num_layers))
        self.norm = hidden_norm(model)

    def forward(self, ids_BS: Tensor) -> Tensor:
        x_BSD = self.embed_tokens(ids_BS)
        if self.embed_positions is not None:
            x_BSD = x_BSD + self.embed_positions(torch.arange(ids_BS.shape[1], device=ids_BS.device))
        for layer in self.layers:
            x_BSD = layer(x_BSD, ids_BS)
        return self.norm(x_BSD)


class ReferenceModel(nn.Module):
    """The whole language model: forward(ids_BS) -> logits [B, S, W].

    A tied head has no parameter of its own (no `lm_head.weight` in the state dict).
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.config = model
        self.model = ReferenceBackbone(model)
        self.lm_head: nn.Linear | None = None
        if not model.tie_word_embeddings:
            self.lm_head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Normal init: `init_std`, gating tables `gate_table_init_std`, gate projections so that gates have std 1."""
        config = self.config
        for name, module in self.named_modules():
            if not isinstance(module, nn.Linear | nn.Embedding):
                continue
            std = config.init_std
            if name.endswith("self_attn.gate_embed"):
                std = config.gate_table_init_std
            elif name.endswith("self_attn.gate_proj"):
                std = 1 / (config.gate_table_init_std * math.sqrt(config.kv_emb_dim))
            nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, ids_BS: Tensor) -> Tensor:
        hidden_BSD = self.model(ids_BS)
        head = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return functional.linear(hidden_BSD, head)

    def loss(self, ids_BS: Tensor, labels_BS: Tensor) -> Tensor:
        """Mean cross entropy in nats per token; labels are already shifted: labels[t] = ids[t + 1]."""
        return functional.cross_entropy(self(ids_BS).flatten(0, 1), labels_BS.flatten())
