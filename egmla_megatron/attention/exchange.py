"""The one collective that brings a micro-batch's gate embeddings home, and its adjoint.

Every rank of the gate group holds d/W columns of all tables of its stage. Two ways to whole rows, equal in result:

* all_to_all: each rank looks up its columns of every member's rows and sends each member just those. Backward: the
  transposed all-to-all routes each rank's gradient columns to their owner.
* all_gather: each rank looks up its columns of the union of the group's rows; the columns are gathered side by side
  (the paper's single all-gather). Backward: a reduce-scatter, since several ranks may have used a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda import Stream
from torch.distributed import ProcessGroup

from egmla_megatron.attention.exchange_probe import collective

__all__ = ["EXCHANGES", "select_rows"]

# W gate group size, R rows looked up here, U rows received, L layers, C columns per rank (d / W), D = W * C


def _side_by_side(received_WULC: Tensor) -> Tensor:
    """Every rank's columns of the same rows -> whole rows [U,L,D]."""
    return received_WULC.permute(1, 2, 0, 3).flatten(2)


def _by_rank(rows_ULD: Tensor, ranks: int) -> Tensor:
    """Whole rows -> the columns of every rank [W,U,L,C]; undoes `_side_by_side`."""
    rows, layers, _ = rows_ULD.shape
    return rows_ULD.view(rows, layers, ranks, -1).permute(2, 0, 1, 3).contiguous()


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RLC: Tensor, group: ProcessGroup, layers: Stream | None) -> Tensor:
        ctx.group, ctx.layers = group, layers
        rows_WULC = rows_RLC.view(group.size(), -1, *rows_RLC.shape[1:])
        received_WULC = torch.empty_like(rows_WULC)
        with collective(rows_WULC):
            dist.all_to_all_single(received_WULC, rows_WULC.contiguous(), group=group)
        return _side_by_side(received_WULC)

    @staticmethod
    def backward(ctx: Any, grad_ULD: Tensor) -> tuple[Tensor, None, None]:
        grad_WULC = _by_rank(grad_ULD, ctx.group.size())
        returned_WULC = torch.empty_like(grad_WULC)
        with collective(grad_WULC, ctx.layers):
            dist.all_to_all_single(returned_WULC, grad_WULC, group=ctx.group)
        return returned_WULC.flatten(0, 1), None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ULC: Tensor, group: ProcessGroup, layers: Stream | None) -> Tensor:
        ctx.group, ctx.layers = group, layers
        received_WULC = rows_ULC.new_empty(group.size(), *rows_ULC.shape)
        with collective(rows_ULC):
            dist.all_gather_into_tensor(received_WULC.flatten(0, 1), rows_ULC.contiguous(), group=group)
        return _side_by_side(received_WULC)

    @staticmethod
    def backward(ctx: Any, grad_ULD: Tensor) -> tuple[Tensor, None, None]:
        grad_WULC = _by_rank(grad_ULD, ctx.group.size())
        summed_ULC = torch.empty_like(grad_WULC[0])
        with collective(grad_WULC, ctx.layers):
            dist.reduce_scatter_tensor(summed_ULC, grad_WULC.flatten(0, 1), group=ctx.group)
        return summed_ULC, None, None


# name of parallel.gate_exchange -> (rows looked up here [R,L,C], group, stream of the layers) -> whole rows [U,L,D]
EXCHANGES: dict[str, Callable[[Tensor, ProcessGroup, Stream | None], Tensor]] = {
    "all_to_all": _AllToAll.apply,
    "all_gather": _AllGather.apply,
}


class _SelectRows(torch.autograd.Function):
    """index_select whose backward writes instead of adding: rows are distinct, except those of padding, whose
    gradients are zero."""

    @staticmethod
    def forward(ctx: Any, rows_RLD: Tensor, own_U: Tensor) -> Tensor:
        ctx.save_for_backward(own_U)
        ctx.rows = len(rows_RLD)
        return rows_RLD.index_select(0, own_U)

    @staticmethod
    def backward(ctx: Any, grad_ULD: Tensor) -> tuple[Tensor, None]:
        (own_U,) = ctx.saved_tensors
        return grad_ULD.new_zeros(ctx.rows, *grad_ULD.shape[1:]).index_copy_(0, own_U, grad_ULD), None


def select_rows(rows_RLD: Tensor, own_U: Tensor) -> Tensor:
    """The rows `own_U` of those a gather brought: [R,L,D] -> [U,L,D]; padding must point at a padding row."""
    return _SelectRows.apply(rows_RLD, own_U)
