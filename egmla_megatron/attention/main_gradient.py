"""Weight gradients that go straight to the main gradient of megatron-core's DDP, without a tensor of their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

__all__ = ["added_by_hand", "has_main_gradient", "linear", "linear_beside", "put_product"]

# R rows, K inputs, N outputs


def has_main_gradient(weight: Parameter) -> bool:
    """Whether it is under megatron-core's DDP, whose hook `added_by_hand` needs."""
    return getattr(weight, "main_grad", None) is not None


def added_by_hand(weight: Parameter) -> None:
    """Tell megatron-core's DDP, in a backward pass, that the main gradient has this one. DDP counts on one way for all
    micro-batches of a step: from now on it drops what autograd makes."""
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    # DDP's hook, which runs behind this, wants to see a gradient and drops it: one element will do
    weight.grad = weight.new_empty(1).expand_as(weight)


def put_product(main_NK: Tensor, left_NR: Tensor, right_RK: Tensor, *, overwrite: bool) -> None:
    """Add a product to `main_NK`, or write it there; a wider type than the factors' needs CUDA."""
    wider = () if main_NK.dtype == left_NR.dtype else (main_NK.dtype,)
    if overwrite:
        torch.mm(left_NR, right_RK, *wider, out=main_NK)
    else:
        torch.addmm(main_NK, left_NR, right_RK, *wider, out=main_NK)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RK: Tensor, weight_NK: Parameter) -> Tensor:
        ctx.save_for_backward(x_RK)
        # as in Transformer Engine's layers, the forward pass says what its backward pass does
        ctx.weight, ctx.overwrite = weight_NK, getattr(weight_NK, "overwrite_main_grad", False)
        return F.linear(x_RK, weight_NK)

    @staticmethod
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, None]:
        grad_RK = grad_RN @ ctx.weight if ctx.needs_input_grad[0] else None
        _weight_gradient(ctx, grad_RN)
        return grad_RK, None


class _LinearBeside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RK: Tensor, weight_NK: Parameter) -> tuple[Tensor, Tensor]:
        return x_RK.view_as(x_RK), _Linear.forward(ctx, x_RK, weight_NK)

    @staticmethod
    def backward(ctx: Any, others_RK: Tensor, grad_RN: Tensor) -> tuple[Tensor, None]:
        _weight_gradient(ctx, grad_RN)
        return others_RK.addmm_(grad_RN, ctx.weight), None


def _weight_gradient(ctx: Any, grad_RN: Tensor) -> None:
    if ctx.needs_input_grad[1]:
        (x_RK,) = ctx.saved_tensors
        put_product(ctx.weight.main_grad, grad_RN.t(), x_RK, overwrite=ctx.overwrite)
        added_by_hand(ctx.weight)


def linear(x_RK: Tensor, weight_NK: Parameter, *, fused: bool) -> Tensor:
    """x W^T [R,N].

    Args:
        fused: under DDP the weight's gradient is added to `weight_NK.main_grad`, or written there, with
            `weight_NK.overwrite_main_grad` (`train.data_parallel`).
    """
    if fused and has_main_gradient(weight_NK):
        return _Linear.apply(x_RK, weight_NK)
    return F.linear(x_RK, weight_NK)


def linear_beside(x: Tensor, weight_NK: Parameter) -> tuple[Tensor, Tensor]:
    """(x, x W^T), for a weight under DDP, as with `linear(fused=True)`.

    Who else reads x must take the one that is returned, and be one product or norm: the gradient that it sends is
    written over by the sum of both, which the product adds, instead of a pass of its own over three such tensors. An
    addition, which hands one gradient to both of its terms, would give the other one the sum, too.
    """
    through, out_RN = _LinearBeside.apply(x.flatten(0, -2), weight_NK)
    return through.view_as(x), out_RN.view(*x.shape[:-1], -1)
