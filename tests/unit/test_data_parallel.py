"""Main gradients that a step's first micro-batch writes, by a layer that treats them as Transformer Engine's do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from egmla_megatron.config.to_mcore import ddp_config
from egmla_megatron.model.build import build_model
from egmla_megatron.train.data_parallel import DataParallel, gaps
from tests.tiny import tiny_run

WIDTH, BATCHES = 5, 3


@pytest.mark.parametrize(
    ("kept", "found"),
    [
        ([], [(0, 9)]),
        ([(0, 9)], []),
        ([(6, 9), (0, 2)], [(2, 6)]),
        ([(3, 5), (5, 6)], [(0, 3), (6, 9)]),
    ],
)
def test_gaps(kept: list[tuple[int, int]], found: list[tuple[int, int]]) -> None:
    assert gaps(kept, 9) == found


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BN: Tensor, weight_NN: Tensor) -> Tensor:
        ctx.save_for_backward(x_BN)
        ctx.weight, ctx.overwrites = weight_NN, getattr(weight_NN, "overwrite_main_grad", False)
        return x_BN @ weight_NN.t()

    @staticmethod
    def backward(ctx: Any, grad_BN: Tensor) -> tuple[Tensor, Tensor]:
        grad_NN = grad_BN.t() @ ctx.saved_tensors[0]
        main_NN = ctx.weight.main_grad
        main_NN.copy_(grad_NN) if ctx.overwrites else main_NN.add_(grad_NN)
        ctx.weight.grad_added_to_main_grad = True
        return grad_BN @ ctx.weight, grad_NN


class Model(torch.nn.Module):
    """One weight that adds its gradients itself between two ordinary ones."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        generator = torch.Generator().manual_seed(0)
        self.before, self.own, self.after = (
            torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator)) for _ in range(3)
        )

    def forward(self, x_BN: Tensor) -> Tensor:
        return (_Multiply.apply(x_BN @ self.before.t(), self.own) @ self.after.t()).square().sum()


@pytest.mark.parametrize("distributed", [True, False])
def test_gradients_are_those_of_zeroed_buffers(world: Any, distributed: bool) -> None:
    """Two steps of several micro-batches with an evaluation between them, over garbage that a step may leave behind."""
    cfg = tiny_run(optimizer={"distributed": distributed})
    module = Model(build_model(cfg, world).config)
    settings = ddp_config(cfg)
    model = DataParallel(module.config, settings, module, pg_collection=world.groups, written=[module.own])
    for step in range(2):
        model.zero_grad_buffer()
        assert not any(weight.main_grad.any() for weight in (module.before, module.after))
        assert bool(module.own.main_grad.any()) == (step > 0)
        with torch.no_grad():
            model(torch.ones(1, WIDTH))  # takes no part in the step
        inputs = [torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(7 * step + i)) for i in range(BATCHES)]
        for x_BN in inputs:
            with model.no_sync():
                model(x_BN).backward()
        reference = Model(module.config)
        for x_BN in inputs:
            (((x_BN @ reference.before.t()) @ reference.own.t()) @ reference.after.t()).square().sum().backward()
        for name, weight in reference.named_parameters():
            torch.testing.assert_close(getattr(module, name).main_grad, weight.grad, msg=name)
