"""Attention, norms, SwiGLU, residual additions and the loss, by the modules of a built model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from egmla_megatron.bench.roofline import cost
from egmla_megatron.bench.roofline.case import Buffers, Call, Case, Differentiable, forward_and_backward
from egmla_megatron.bench.roofline.sizes import Sizes
from egmla_megatron.model.build import BuiltModel

__all__ = ["layer_cases"]

# S tokens of a sequence, B sequences, N heads, K width of q and k heads, V of v heads, H hidden size, F width of the
# MLP, C columns of a norm, O words of the vocabulary


def layer_cases(sizes: Sizes, built: BuiltModel, buffers: Buffers) -> list[Case]:
    """Rows of what a layer computes between its linear layers, but for gate and heads, and of the loss.

    Args:
        built: a model of one layer or more; the first layer's modules are called.
    """
    model, layer = sizes.model, built.module.decoder.layers[0]
    attention, layers = layer.self_attention, sizes.model.num_layers
    # before attention, before the MLP, and behind the last layer; the latent's
    last = built.module.decoder.final_layernorm  # a layer's own may hand on the residual as well
    norms = [("RMSNorm of hidden", 2 * layers + 1, model.hidden_size, last)]
    latent = attention.kv_layernorm
    if built.kernels == "torch":
        norms += [("RMSNorm of the latent", layers, model.kv_lora_rank, latent)]
    if model.q_lora_rank:
        norms += [("RMSNorm of q's latent", layers, model.q_lora_rank, attention.q_layernorm)]
    found = forward_and_backward(_attention(sizes, attention, buffers))
    for name, count, columns, module in norms:
        found += forward_and_backward(_norm(sizes, name, count, columns, module, buffers))
    if built.kernels == "triton":
        found += forward_and_backward(_latent_norm(sizes, latent, buffers))
    found += forward_and_backward(_swiglu(sizes, built, buffers))
    found += _residual(sizes, built, buffers)
    return found + forward_and_backward(_cross_entropy(sizes, built, buffers))


def _attention(sizes: Sizes, attention: Any, buffers: Buffers) -> Differentiable:
    shape = (sizes.length, sizes.sequences, sizes.model.num_attention_heads)
    key, value = sizes.heads.nope + sizes.heads.rope, sizes.heads.v

    def attend(q_SBNK: Tensor, k_SBNK: Tensor, v_SBNV: Tensor) -> Tensor:
        return attention.core_attention(q_SBNK, k_SBNK, v_SBNV, None, attn_mask_type=attention.attn_mask_type)

    return Differentiable(
        kernel="attention",
        count=sizes.model.num_layers,
        costs=(cost.attention_forward(sizes), cost.attention_backward(sizes)),
        function=attend,
        inputs=lambda: tuple(buffers.normal(*shape, width, grad=True) for width in (key, key, value)),
        gradients=lambda: (buffers.normal(*shape[:2], sizes.value_width),),
        backward_reads_outputs=True,
    )


def _norm(sizes: Sizes, name: str, count: int, columns: int, module: Any, buffers: Buffers) -> Differentiable:
    shape = (sizes.length, sizes.sequences, columns)
    return Differentiable(
        kernel=name,
        count=count,
        costs=(cost.norm_forward(sizes.tokens, columns, sizes), cost.norm_backward(sizes.tokens, columns, sizes)),
        function=lambda x_SBC, _: module(x_SBC),
        inputs=lambda: (buffers.normal(*shape, grad=True), module.weight),
        gradients=lambda: (buffers.normal(*shape),),
    )


def _latent_norm(sizes: Sizes, module: Any, buffers: Buffers) -> Differentiable:
    """Our kernel, which also takes the RoPE key out of what the down-projection wrote."""
    latent, rope = sizes.model.kv_lora_rank, sizes.heads.rope
    shape = (sizes.length, sizes.sequences)
    return Differentiable(
        kernel="RMSNorm of the latent, our kernel",
        count=sizes.model.num_layers,
        costs=(cost.latent_norm_forward(sizes), cost.latent_norm_backward(sizes)),
        function=lambda down_SBC, _: module(down_SBC),
        inputs=lambda: (buffers.normal(*shape, latent + rope, grad=True), module.weight),
        gradients=lambda: (buffers.normal(*shape, latent), buffers.normal(*shape, rope)),
        backward_reads=lambda found: (found[0][..., :latent], found[1]),
    )


def _swiglu(sizes: Sizes, built: BuiltModel, buffers: Buffers) -> Differentiable:
    """As megatron-core's MLP chooses it."""
    config, width = built.config, sizes.model.intermediate_size
    mlp = built.module.decoder.layers[0].mlp

    def by_operations(x_SBF: Tensor) -> Tensor:
        gate, up = x_SBF.chunk(2, dim=-1)
        return F.silu(gate) * up

    return Differentiable(
        kernel="SwiGLU",
        count=sizes.model.num_layers,
        costs=(cost.swiglu_forward(sizes), cost.swiglu_backward(sizes)),
        function=mlp.activation_func if config.use_te_activation_func else by_operations,
        inputs=lambda: (buffers.normal(sizes.length, sizes.sequences, 2 * width, grad=True),),
        gradients=lambda: (buffers.normal(sizes.length, sizes.sequences, width),),
    )


def _residual(sizes: Sizes, built: BuiltModel, buffers: Buffers) -> list[Case]:
    """A layer adds twice. In backward there are three sums: of what attention and MLP read, which Transformer Engine's
    norms have within, and of what the q and kv projections read, which the latter may add itself."""
    hidden = sizes.model.hidden_size

    def prepare() -> Call:
        both = tuple(buffers.normal(sizes.length, sizes.sequences, hidden) for _ in range(2))
        return Call(both, lambda _: torch.add(*both))

    layers, needs = sizes.model.num_layers, cost.add(sizes.tokens, hidden, sizes)
    of_norms = 0 if built.implementation == "te" else 2
    counts = {"forward": 2 * layers, "backward": (of_norms + (not sizes.one_gradient)) * layers}
    return [Case("residual sum", way, count, needs, prepare) for way, count in counts.items() if count]


def _cross_entropy(sizes: Sizes, built: BuiltModel, buffers: Buffers) -> Differentiable:
    shape, words = (sizes.length, sizes.sequences), sizes.model.vocab_size

    def labels_BS() -> Tensor:
        return torch.randint(words, shape[::-1], device=buffers.device)

    return Differentiable(
        kernel="cross-entropy",
        count=1,
        costs=(cost.cross_entropy_forward(sizes), cost.cross_entropy_backward(sizes)),
        function=lambda logits_SBO, labels: built.module.compute_language_model_loss(labels, logits_SBO),
        inputs=lambda: (buffers.normal(*shape, words, grad=True), labels_BS()),
        gradients=lambda: (buffers.normal(*shape[::-1], dtype=torch.float32),),
    )
