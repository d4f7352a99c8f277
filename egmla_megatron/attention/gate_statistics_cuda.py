"""Statistics of a LayerNorm whose columns several ranks share: a small pass of each rank over its own columns, and one
all-reduce, before the kernels that normalise. Imported where there is a GPU only.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor
from torch.distributed import ProcessGroup

from egmla_megatron.attention.gate_parts_cuda import KeysAndValues, combine, latent_and_gate, layout, places, warps

__all__ = ["shared_statistics", "shared_sums"]

# T tokens, N columns of this rank, U rows


@triton.jit
def _moments(
    up_ptr, gate_ptr, index_ptr, local_ptr, columns, tokens, GATE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    up, gate = latent_and_gate(up_ptr, gate_ptr, index_ptr, token, column, columns, mask)
    out = combine(up, gate, GATE)
    mean = tl.sum(tl.where(mask, out, 0.0), axis=0) / columns
    centred = tl.where(mask, out - mean, 0.0)
    tl.store(local_ptr + token, mean)
    tl.store(local_ptr + tokens + token, tl.sum(centred * centred, axis=0) / columns)
    tl.store(local_ptr + 2 * tokens + token, mean * mean)


@triton.jit
def _sums(
    key_ptr, value_ptr, up_ptr, gate_ptr, index_ptr, weight_ptr, mean_ptr, rstd_ptr, local_ptr, columns, tokens,
    batch, key_s, key_b, key_n, value_s, value_b, value_n,
    GATE: tl.constexpr, BLOCK: tl.constexpr, NOPE: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    at = places(
        token, column, key_ptr, value_ptr, columns, batch, key_s, key_b, key_n, value_s, value_b, value_n, NOPE, V
    )
    grad = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    grad *= tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    up, gate = latent_and_gate(up_ptr, gate_ptr, index_ptr, token, column, columns, mask)
    normed = (combine(up, gate, GATE) - tl.load(mean_ptr + token)) * tl.load(rstd_ptr + token)
    tl.store(local_ptr + token, tl.sum(grad, axis=0))
    tl.store(local_ptr + tokens + token, tl.sum(grad * normed, axis=0))


def shared_statistics(
    up_TN: Tensor, gate_UN: Tensor, row_map: Tensor, eps: float, gate: str, group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Mean and 1 / sqrt(variance + eps) of every token's gated latent [T] over the columns of all ranks, fp32.

    The variance is put together from the ranks' variances and means (Chan's formula), as `layer_norm_over_tp` does.

    Args:
        up_TN, gate_UN, row_map: contiguous, as `gate_norm`; of this rank's columns, as many as of every other's.
    """
    tokens, columns = up_TN.shape
    local_3T = up_TN.new_empty(3, tokens, dtype=torch.float32)
    _moments[(tokens,)](
        up_TN, gate_UN, row_map, local_3T, columns, tokens,
        GATE=gate, BLOCK=triton.next_power_of_2(columns), num_warps=warps(columns, 1024),
    )  # fmt: skip
    dist.all_reduce(local_3T, group=group)
    mean_T, variance_T, square_T = (local_3T / group.size()).unbind()
    between_T = (square_T - mean_T * mean_T).clamp_min(0)  # fp32 may round below it
    return mean_T, torch.rsqrt(variance_T + between_T + eps)


def shared_sums(
    gradients: Tensor | KeysAndValues, up_TN: Tensor, gate_UN: Tensor, row_map: Tensor, weight_N: Tensor,
    mean_T: Tensor, rstd_T: Tensor, gate: str, group: ProcessGroup,
) -> Tensor:  # fmt: skip
    """What LayerNorm's backward pass subtracts, sums over the columns of all ranks [2, T], fp32: of the gradient times
    weight, and of that times the normed value."""
    tokens, columns = up_TN.shape
    local_2T = up_TN.new_empty(2, tokens, dtype=torch.float32)
    pointers, strides, widths = layout(gradients)
    _sums[(tokens,)](
        *pointers, up_TN, gate_UN, row_map, weight_N, mean_T, rstd_T, local_2T, columns, tokens, *strides,
        GATE=gate, BLOCK=triton.next_power_of_2(columns), **widths, num_warps=warps(columns, 1024),
    )  # fmt: skip
    dist.all_reduce(local_2T, group=group)
    return local_2T
