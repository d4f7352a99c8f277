"""Gate and LayerNorm, alone and with all that attention reads, as functions of autograd; imported where there is a GPU
only.

Gate and LayerNorm write keys and values where attention wants them, and read those gradients from where attention left
them: the gated latents of all heads never stand in memory by themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from egmla_megatron.attention.gate_norm_cuda import Saved, gate_backward, gate_forward
from egmla_megatron.attention.gate_parts_cuda import KeysAndValues
from egmla_megatron.attention.head_sizes import HeadSizes
from egmla_megatron.attention.split_heads_cuda import heads_backward, heads_forward, with_contiguous_rows

__all__ = ["gate_heads", "gate_norm"]

# S sequence, B batch, T = S * B tokens, H heads, N = H * (nope + v) columns, U rows, R rope width


class _GateNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, up_TN: Tensor, gate_UN: Tensor, row_map: Tensor, weight: Any, bias: Any, eps: float, gate: str,
        group: ProcessGroup | None,
    ) -> Tensor:  # fmt: skip
        out_TN = torch.empty_like(up_TN, memory_format=torch.contiguous_format)
        ctx.save_for_backward(*gate_forward(up_TN, gate_UN, row_map, weight, bias, eps, gate, out_TN, group))
        ctx.gate, ctx.group = gate, group
        return out_TN

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Any, ...]:
        found = gate_backward(Saved(*ctx.saved_tensors), ctx.gate, grad_TN.contiguous(), ctx.group)
        return found.up_TN, found.gate_UN, None, found.weight_N, found.bias_N, *(None,) * 3


class _GateHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, up_SBN: Tensor, gate_UN: Tensor, rope_SBR: Tensor, weight_N: Any, bias_N: Any,
        row_map: Tensor, angles_SR: Tensor, eps: float, gate: str, heads: int, sizes: HeadSizes,
        group: ProcessGroup | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        query, key, value = heads_forward(q, None, rope_SBR, angles_SR, heads, sizes)
        into = KeysAndValues(key, value, sizes.nope)
        saved = gate_forward(up_SBN.flatten(0, 1), gate_UN, row_map, weight_N, bias_N, eps, gate, into, group)
        ctx.save_for_backward(*saved, angles_SR)
        ctx.gate, ctx.sizes, ctx.group = gate, sizes, group
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        *saved, angles_SR = ctx.saved_tensors
        query, key, value = with_contiguous_rows(grads)
        found = gate_backward(Saved(*saved), ctx.gate, KeysAndValues(key, value, ctx.sizes.nope), ctx.group)
        dq, _, drope_SBR = heads_backward((query, key, value), angles_SR, ctx.sizes, kv=False)
        dup_SBN = found.up_TN.view(*query.shape[:2], -1)
        return dq, dup_SBN, found.gate_UN, drope_SBR, found.weight_N, found.bias_N, *(None,) * 7


def gate_heads(
    q: Tensor, up_SBN: Tensor, gate_UN: Tensor, rope_SBR: Tensor, weight_N: Tensor | None, bias_N: Tensor | None,
    row_map: Tensor, angles_SR: Tensor, eps: float, gate: str, heads: int, sizes: HeadSizes,
    group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`split_heads` of q and `gate_norm` of the up-projected latents: query [S,B,H,K], key [S,B,H,K], value [S,B,H,v].

    Arguments as theirs.
    """
    norm = (weight_N, bias_N, row_map, angles_SR, eps, gate)
    return _GateHeads.apply(q, up_SBN, gate_UN, rope_SBR, *norm, heads, sizes, group)


def gate_norm(
    up_TN: Tensor, gate_UN: Tensor, row_map: Tensor, weight_N: Tensor | None, bias_N: Tensor | None, eps: float,
    gate: str, group: ProcessGroup | None = None,
) -> Tensor:  # fmt: skip
    """LayerNorm(combine(up[t], gate[row of t])) over all columns, as the paper's equations 3 to 5.

    Args:
        up_TN: up-projected latents; gate_UN: gates of the rows; row_map: `pack_row_map` of the T tokens.
        weight_N, bias_N: of the LayerNorm; None: there is none.
        gate: one of `KERNEL_GATES`.
        group: ranks that share the columns of the norm, N each; None: this rank has them all.
    """
    return _GateNorm.apply(up_TN, gate_UN, row_map, weight_N, bias_N, eps, gate, group)
