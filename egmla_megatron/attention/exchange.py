"""The one collective that brings a micro-batch's gate embeddings home, and its adjoint.

Every rank of the gate group holds d/W columns of all tables of its stage. Rank r looks up its columns
for the tokens of every rank of the group; an all-to-all then gives each rank all columns of its own
tokens. The backward is the transposed all-to-all: it routes each rank's gradient columns to their owner.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup

__all__ = ["exchange_columns", "gather_ids"]

# W gate group size, T tokens of one rank, L layers of the stage, C columns per rank (d / W), D = W * C


class _ExchangeColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows_WTLC: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        received_WTLC = torch.empty_like(rows_WTLC)
        dist.all_to_all_single(received_WTLC, rows_WTLC.contiguous(), group=group)
        return received_WTLC.permute(1, 2, 0, 3).flatten(2)

    @staticmethod
    def backward(ctx: FunctionCtx, grad_TLD: Tensor) -> tuple[Tensor, None]:
        group = ctx.group  # type: ignore[attr-defined]
        tokens, layers, _ = grad_TLD.shape
        grad_WTLC = grad_TLD.view(tokens, layers, group.size(), -1).permute(2, 0, 1, 3).contiguous()
        returned_WTLC = torch.empty_like(grad_WTLC)
        dist.all_to_all_single(returned_WTLC, grad_WTLC, group=group)
        return returned_WTLC, None


def exchange_columns(rows_WTLC: Tensor, group: ProcessGroup) -> Tensor:
    """My columns of every rank's tokens [W,T,L,C] -> all columns of my own tokens [T,L,D]."""
    return _ExchangeColumns.apply(rows_WTLC, group)


def gather_ids(ids_T: Tensor, group: ProcessGroup) -> Tensor:
    """Token ids of every rank of the group: [T] -> [W,T]."""
    everyone_WT = torch.empty(group.size(), ids_T.numel(), dtype=ids_T.dtype, device=ids_T.device)
    dist.all_gather_into_tensor(everyone_WT.view(-1), ids_T.contiguous(), group=group)
    return everyone_WT
