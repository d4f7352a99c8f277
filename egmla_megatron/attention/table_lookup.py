"""Reading rows of the gating tables, and their gradient added straight to the main gradient.

Every look-up under megatron-core's DDP adds by hand, since that wants one way for all micro-batches of a step.

A micro-batch reads a few percent of a table's rows. torch's gradient of an embedding is as large as the table: for
the 1.2B model 1.2 GB that are zeroed, filled in a few places, added to the main gradient and freed, every micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from egmla_megatron.attention.main_gradient import added_by_hand, has_main_gradient

__all__ = ["look_up"]

# V vocabulary, R rows that are looked up, L layers, C columns of this rank, B blocks of rows


class _LookUp(torch.autograd.Function):
    """Rows of the table; backward adds to `weight.main_grad` and tells megatron-core's DDP that it did."""

    @staticmethod
    def forward(ctx: Any, weight_VLC: Parameter, ids_R: Tensor, blocks: int) -> Tensor:
        ctx.weight, ctx.blocks = weight_VLC, blocks
        ctx.save_for_backward(ids_R)
        return _rows(weight_VLC, ids_R)

    @staticmethod
    def backward(ctx: Any, grad_RLC: Tensor) -> tuple[None, None, None]:
        (ids_R,) = ctx.saved_tensors
        weight_VLC = ctx.weight
        main_VLC, scale = weight_VLC.main_grad, getattr(weight_VLC, "gradient_scale", 1.0)
        if ctx.blocks:
            parts = zip(ids_R.chunk(ctx.blocks), grad_RLC.to(main_VLC.dtype).chunk(ctx.blocks), strict=True)
            for ids, grad in parts:  # ids of one block are distinct, so the order of additions is always the same
                main_VLC.index_add_(0, ids, grad, alpha=scale)
        else:
            grad_RN = grad_RLC.flatten(1)
            dense_VN = torch.ops.aten.embedding_dense_backward(grad_RN, ids_R, len(weight_VLC), -1, False)
            main_VLC.add_(dense_VN.view_as(main_VLC), alpha=scale)
        added_by_hand(weight_VLC)
        return None, None, None


def _rows(weight_VLC: Tensor, ids_R: Tensor) -> Tensor:
    _, layers, columns = weight_VLC.shape
    return F.embedding(ids_R, weight_VLC.view(-1, layers * columns)).view(-1, layers, columns)


def look_up(weight_VLC: Parameter, ids_R: Tensor, distinct_blocks: int) -> Tensor:
    """Rows `ids_R` of the table [R,L,C].

    Args:
        weight_VLC: the table. Under megatron-core's DDP, whose hook it needs, it has a `main_grad`, to which gradients
            are added, times its `gradient_scale` if it has one (`train.data_parallel`); else they are a tensor like the
            table, as torch makes it.
        distinct_blocks: `ids_R` is so many blocks of equal length, the ids of each distinct but for padding, whose
            gradients are zero; then nothing as large as the table is made. 0: ids may repeat.
    """
    if has_main_gradient(weight_VLC):
        return _LookUp.apply(weight_VLC, ids_R, distinct_blocks)
    return _rows(weight_VLC, ids_R)
