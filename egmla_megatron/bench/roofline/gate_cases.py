"""Gate with its LayerNorm, and the heads' queries, keys and values: our kernels and the same by single operations.

Where the model's gate has a kernel, gate and heads are one function; those of each alone, which run under recomputation
and tensor parallelism, stand beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from egmla_megatron.attention.gated_kv_up import GATES, gate_by_row
from egmla_megatron.attention.head_sizes import HeadSizes
from egmla_megatron.attention.sum_by_row import pack_row_map
from egmla_megatron.bench import zipf
from egmla_megatron.bench.roofline import cost
from egmla_megatron.bench.roofline.case import Buffers, Case, Differentiable, forward_and_backward
from egmla_megatron.bench.roofline.sizes import Sizes

__all__ = ["gate_cases", "heads_cases", "row_of_tokens", "split_by_operations"]

# S tokens of a sequence, B sequences, T = S * B tokens in sequence-first order, U rows of the gate, N columns of all
# heads, R width of RoPE

_SEED = 0
BY_OPERATIONS = "by single operations"


def row_of_tokens(sizes: Sizes) -> Tensor:
    """The row of every token [T], int64 on the host: each distinct id has one, frequent ids many by Zipf's law."""
    rest = zipf.draw((sizes.tokens - sizes.distinct,), sizes.distinct, _SEED)
    found = np.concatenate([np.arange(sizes.distinct), rest])
    return torch.from_numpy(np.random.default_rng(_SEED).permutation(found))


def gate_cases(sizes: Sizes, *, triton: bool, buffers: Buffers) -> list[Case]:
    """Rows of the gate and the norm behind it; none for a model without gate.

    Args:
        triton: our kernel computes them; single operations then stand beside it for comparison.
    """
    model = sizes.model
    if not model.gated:
        return []
    gate, eps = GATES[model.gate], model.gate_norm_eps

    def by_operations(
        up_SBN: Tensor, gate_UN: Tensor, row_map: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        gated_SBN = gate_by_row(up_SBN, gate_UN, row_map, gate)
        return F.layer_norm(gated_SBN, gated_SBN.shape[-1:], weight, bias, eps) if model.gate_norm else gated_SBN

    if not (triton and gate.kernel):
        return forward_and_backward(_gate(sizes, by_operations, BY_OPERATIONS, buffers))
    from egmla_megatron.attention.gate_heads_cuda import gate_norm

    name = gate.kernel

    def by_kernel(
        up_SBN: Tensor, gate_UN: Tensor, row_map: Tensor, weight: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        return gate_norm(up_SBN.flatten(0, 1), gate_UN, row_map, weight, bias, eps, name).view_as(up_SBN)

    return [
        *forward_and_backward(_gate_heads(sizes, name, buffers)),
        *forward_and_backward(_gate(sizes, by_kernel, "our kernel", buffers, counted=False)),
        *forward_and_backward(_gate(sizes, by_operations, BY_OPERATIONS, buffers, counted=False)),
    ]


def _gate_heads(sizes: Sizes, gate: str, buffers: Buffers) -> Differentiable:
    """Inputs are those of the gate and of the heads, but for what one would hand to the other."""
    from egmla_megatron.attention.gate_heads_cuda import gate_heads

    gated = _gate(sizes, None, "", buffers)
    split = _heads(sizes, None, "", buffers)
    heads, eps = sizes.model.num_attention_heads, sizes.model.gate_norm_eps

    def inputs() -> tuple[Tensor, ...]:
        q, _, rope_SBR, angles_SR = split.inputs()
        return (q, rope_SBR, angles_SR, *gated.inputs())

    def run(
        q: Tensor, rope_SBR: Tensor, angles_SR: Tensor, up_SBN: Tensor, gate_UN: Tensor, row_map: Tensor,
        weight: Tensor | None = None, bias: Tensor | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        return gate_heads(q, up_SBN, gate_UN, rope_SBR, weight, bias, row_map, angles_SR, eps, gate, heads, sizes.heads)

    half = sizes.heads.rope // 2
    return Differentiable(
        kernel=f"gate{', LayerNorm' if sizes.model.gate_norm else ''} and heads with RoPE, our kernels",
        count=sizes.model.num_layers,
        costs=(cost.gate_heads_forward(sizes), cost.gate_heads_backward(sizes)),
        function=run,
        inputs=inputs,
        gradients=split.gradients,
        forward_reads=lambda found: (*found[:2], found[2][:, :half], *gated.forward_reads(found[3:])),
        backward_reads=lambda found: (found[2][:, :half], *gated.backward_reads(found[3:])),
    )


def _gate(sizes: Sizes, function: Any, how: str, buffers: Buffers, *, counted: bool = True) -> Differentiable:
    shape, columns = (sizes.length, sizes.sequences), sizes.kv_width
    packed = pack_row_map(row_of_tokens(sizes), sizes.rows)

    def inputs() -> tuple[Tensor, ...]:
        norm = [buffers.normal(columns, grad=True) for _ in range(2)] if sizes.model.gate_norm else []
        latents, gates = buffers.normal(*shape, columns, grad=True), buffers.normal(sizes.rows, columns, grad=True)
        return latents, gates, packed.to(buffers.device, copy=True), *norm

    return Differentiable(
        kernel=f"gate{' and LayerNorm' if sizes.model.gate_norm else ''}, {how}",
        count=sizes.model.num_layers,
        costs=(cost.gate_forward(sizes), cost.gate_backward(sizes)),
        function=function,
        inputs=inputs,
        gradients=lambda: (buffers.normal(*shape, columns),),
        forward_reads=lambda found: (*found[:2], found[2][: sizes.tokens], *found[3:]),
        backward_reads=lambda found: found[:4],  # not the bias
        counted=counted,
    )


def heads_cases(sizes: Sizes, *, triton: bool, buffers: Buffers) -> list[Case]:
    """Rows of what attention reads, from the projections: RoPE, the shared key handed to all heads, values apart.

    Args:
        triton: our kernel computes them, or together with the gate; single operations then stand beside it for
            comparison.
    """
    model = sizes.model
    alone = not (model.gated and GATES[model.gate].kernel)
    if not triton:
        return forward_and_backward(_heads(sizes, split_by_operations, BY_OPERATIONS, buffers))
    from egmla_megatron.attention.split_heads_cuda import split_heads

    return [
        *forward_and_backward(_heads(sizes, split_heads, "our kernel", buffers, counted=alone)),
        *forward_and_backward(_heads(sizes, split_by_operations, BY_OPERATIONS, buffers, counted=False)),
    ]


def split_by_operations(
    q: Tensor, kv: Tensor, rope_SBR: Tensor, angles_SR: Tensor, heads: int, sizes: HeadSizes
) -> tuple[Tensor, Tensor, Tensor]:
    """As `attention.split_heads_cuda.split_heads`."""
    angles_S11r = angles_SR[:, None, None, : sizes.rope // 2]
    cos, sin = angles_S11r.cos().to(q.dtype), angles_S11r.sin().to(q.dtype)

    def rotated(x: Tensor) -> Tensor:
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1)

    nope, with_position = q.unflatten(-1, (heads, -1)).split([sizes.nope, sizes.rope], dim=-1)
    key, value = kv.unflatten(-1, (heads, -1)).split([sizes.nope, sizes.v], dim=-1)
    shared = rotated(rope_SBR[:, :, None]).expand(-1, -1, heads, -1)
    return torch.cat([nope, rotated(with_position)], -1), torch.cat([key, shared], -1), value.contiguous()


def _heads(sizes: Sizes, function: Any, how: str, buffers: Buffers, *, counted: bool = True) -> Differentiable:
    shape, count, each = (sizes.length, sizes.sequences), sizes.model.num_attention_heads, sizes.heads
    half = each.rope // 2

    def inputs() -> tuple[Tensor, ...]:
        q, kv = (buffers.normal(*shape, width, grad=True) for width in (sizes.key_width, sizes.kv_width))
        # the model's is the end of what the down-projection wrote
        down = buffers.normal(*shape, sizes.model.kv_lora_rank + each.rope)
        rope_SBR = down[..., sizes.model.kv_lora_rank :].requires_grad_()
        frequency_R = sizes.model.rope_theta ** -(torch.arange(each.rope, device=buffers.device) % half / half)
        return q, kv, rope_SBR, torch.arange(sizes.length, device=buffers.device)[:, None] * frequency_R

    def gradients() -> tuple[Tensor, ...]:
        widths = (each.nope + each.rope, each.nope + each.rope, each.v)
        return tuple(buffers.normal(*shape, count, width) for width in widths)

    return Differentiable(
        kernel=f"heads with RoPE, {how}",
        count=sizes.model.num_layers,
        costs=(cost.split_heads(sizes), cost.split_heads(sizes)),
        function=lambda *given: function(*given, count, each),
        inputs=inputs,
        gradients=gradients,
        forward_reads=lambda found: (*found[:3], found[3][:, :half]),
        backward_reads=lambda found: (found[3][:, :half],),
        counted=counted,
    )
