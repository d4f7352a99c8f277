"""Gradients of the tables that are added to the main gradient, against those that torch makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from egmla_megatron.attention.table_lookup import look_up

V, L, C = 11, 3, 4


def under_ddp(main: torch.dtype) -> tuple[Any, list[bool]]:
    """A table with a main gradient."""
    return hooked(torch.randn(V, L, C, generator=torch.Generator().manual_seed(0)), main)


def hooked(start: torch.Tensor, main: torch.dtype) -> tuple[Any, list[bool]]:
    """A parameter with a main gradient and what megatron-core's hook does behind backward."""
    weight: Any = torch.nn.Parameter(start)
    weight.main_grad = torch.zeros_like(start, dtype=main)
    weight.grad_added_to_main_grad = False
    seen: list[bool] = []

    def hook(*_: Any) -> None:
        assert weight.grad is not None  # megatron-core asserts it where reductions overlap
        seen.append(weight.grad_added_to_main_grad)
        if not weight.grad_added_to_main_grad:
            weight.main_grad.add_(weight.grad)
        weight.grad = None

    weight.keep = weight.expand_as(weight).grad_fn.next_functions[0][0]
    weight.keep.register_hook(hook)
    return weight, seen


def looked_up(weight: Any, ids: torch.Tensor, blocks: int, seed: int) -> torch.Tensor:
    """A loss; padding (a second id 0 in a block) has no gradient."""
    rows = look_up(weight, ids, blocks)
    factors = torch.randn(rows.shape, generator=torch.Generator().manual_seed(seed))
    for block in range(max(1, blocks)):
        part = ids.chunk(max(1, blocks))[block]
        first = block * len(part)
        factors[first + (part == 0).nonzero().flatten()[1:]] = 0
    return (rows * factors).sum()


@pytest.mark.parametrize("main", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("order", "scale"), [((1, 2), 1.0), ((2, 0), 0.25), ((0, 2), 1.0), ((0, 0), 0.25)])
def test_micro_batches_of_either_kind_add_up(order: tuple[int, int], scale: float, main: torch.dtype) -> None:
    ids = {1: torch.tensor([0, 3, 5, 0]), 2: torch.tensor([1, 4, 0, 4, 7, 0]), 0: torch.tensor([2, 2, 9, 0, 2])}
    weight, seen = under_ddp(main)
    if scale != 1:
        weight.gradient_scale = scale
    plain: Any = torch.nn.Parameter(weight.detach().clone())
    for number, blocks in enumerate(order):
        looked_up(weight, ids[blocks], blocks, number).backward()
        looked_up(plain, ids[blocks], blocks, number).backward()
    assert seen == [True, True] and weight.grad is None
    bound = 1e-6 if main == torch.float32 else 2e-2
    torch.testing.assert_close(weight.main_grad.float(), scale * plain.grad, rtol=bound, atol=bound)
