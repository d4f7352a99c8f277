"""Sums over the tokens that share a row: the adjoint of reading one row for many tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["RowMap", "pack_row_map", "sum_by_row", "unpack_row_map"]

# T tokens, U rows, N columns


class RowMap(NamedTuple):
    """Which row each token reads, and for each row which tokens read it. int64."""

    index_T: Tensor  # row of every token
    order_T: Tensor  # tokens in ascending order of their row, those of one row in ascending order
    starts_V: Tensor  # V = U + 1: the tokens of row u stand in order_T[starts_V[u] : starts_V[u + 1]]


def pack_row_map(index_T: Tensor, rows: int) -> Tensor:
    """The whole map of `index_T` as one tensor [2 T + U + 1], the shape in which it travels through the layers."""
    counts_U = torch.bincount(index_T, minlength=rows)
    starts_V = torch.cat([counts_U.new_zeros(1), counts_U.cumsum(0)])
    return torch.cat([index_T, torch.argsort(index_T, stable=True), starts_V])


def unpack_row_map(packed: Tensor, tokens: int) -> RowMap:
    """Views of what `pack_row_map` made for `tokens` tokens."""
    return RowMap(packed[:tokens], packed[tokens : 2 * tokens], packed[2 * tokens :])


def sum_by_row(x_TN: Tensor, rows: RowMap) -> Tensor:
    """[T,N] -> [U,N], the sum over the tokens of each row in fp32 (0 where there is none), always in the same order.

    torch's own ways lose against that: `index_add_` adds in bf16 and in no order, and the gradient of an embedding
    sorts the tokens anew for every layer.
    """
    if not x_TN.is_cuda:
        wide_TN = x_TN.float() if x_TN.dtype in (torch.bfloat16, torch.float16) else x_TN  # a CPU adds in its type
        summed_UN = torch.ops.aten.embedding_dense_backward(wide_TN, rows.index_T, len(rows.starts_V) - 1, -1, False)
        return summed_UN.to(x_TN.dtype)
    from egmla_megatron.attention.sum_by_row_cuda import sum_by_row_cuda

    return sum_by_row_cuda(x_TN, rows.order_T, rows.starts_V)
