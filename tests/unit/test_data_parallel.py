"""Main gradients that a step's first micro-batch writes, by a layer that treats them as Transformer Engine's do, and
small gradients that are added together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from egmla_megatron.config.to_mcore import ddp_config
from egmla_megatron.model.build import build_model
from egmla_megatron.parallel.world import seed_everything
from egmla_megatron.train.data_parallel import DataParallel, gaps
from egmla_megatron.train.small_gradients import SMALL
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


class Norms(torch.nn.Module):
    """Vectors in bf16, one used twice and one that the loss does not need, and a matrix that is not small."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, generator=generator).bfloat16())

        self.large, self.unused = random(WIDTH, SMALL // WIDTH + 1), random(WIDTH)
        self.vectors = torch.nn.ParameterList([random(WIDTH) for _ in range(4)])
        self.vectors[1].zero_out_wgrad = True  # as megatron-core marks tied embeddings

    def forward(self, x_BN: Tensor, *, all_of_them: bool = True) -> Tensor:
        for vector in [*self.vectors, self.vectors[0]][: None if all_of_them else 2]:
            x_BN = x_BN * vector + vector
        return (x_BN @ self.large).float().square().mean()


@pytest.mark.parametrize("overlap", [True, False])
def test_small_gradients_are_added_together_and_to_the_same_bits(
    world: Any, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = tiny_run(parallel={"overlap_grad_reduce": overlap})
    config = build_model(cfg, world).config
    additions: list[int] = []
    together = torch._foreach_add_
    monkeypatch.setattr(
        torch, "_foreach_add_", lambda into, *rest: (additions.append(len(into)), together(into, *rest))[1]
    )
    found = []
    for kind in (DataParallel, DistributedDataParallel):
        module = Norms(config)
        written = {"written": []} if kind is DataParallel else {}
        model = kind(config, ddp_config(cfg), module, pg_collection=world.groups, **written)
        model.zero_grad_buffer()
        for index in range(BATCHES):
            x_BN = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(index)).bfloat16()
            with model.no_sync():
                model(x_BN, all_of_them=index != 1).backward()
        assert all(weight.grad is None for weight in module.parameters())
        found.append([weight.main_grad.clone() for weight in module.parameters()])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))
    assert found[0][1].count_nonzero() == 0 and all(main.any() for i, main in enumerate(found[0]) if i != 1)
    assert additions == [3, 1, 3]


def test_small_gradients_do_not_wait_for_the_end(world: Any) -> None:
    """A bucket whose gradients are all there is reduced while those of others are still to come."""
    cfg = tiny_run(parallel={"overlap_grad_reduce": True}, optimizer={"distributed": True})
    module = Norms(build_model(cfg, world).config)
    settings = replace(ddp_config(cfg), bucket_size=1)
    model = DataParallel(module.config, settings, module, pg_collection=world.groups, written=[])
    groups = {id(group): group for group in model.param_to_bucket_group.values()}
    assert len(groups) > 3
    waited: list[int] = []
    model.zero_grad_buffer()
    x_BN = torch.randn(4, WIDTH).bfloat16().requires_grad_()
    x_BN.register_hook(lambda _: waited.append(sum(len(each.waiting) for each in model.small.buckets.values())))
    model(x_BN).backward()
    assert waited == [0]
    ready = [group.per_param_grad_ready_counts for group in groups.values()]
    assert sum(map(len, ready)) == len(list(module.parameters())) - 1  # all but the one that is not needed


class _Twice(torch.autograd.Function):
    """A part of the model that backward runs again by itself, as recomputation does."""

    @staticmethod
    def forward(ctx: Any, x_BN: Tensor, part: Any) -> Tensor:
        ctx.save_for_backward(x_BN)
        ctx.part = part
        return part(x_BN)

    @staticmethod
    def backward(ctx: Any, grad_BN: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            x_BN = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(ctx.part(x_BN), grad_BN)
        assert x_BN.grad is not None
        return x_BN.grad, None


def small_model(world: Any) -> tuple[DataParallel, Norms]:
    module = Norms(build_model(tiny_run(), world).config)
    model = DataParallel(module.config, ddp_config(tiny_run()), module, pg_collection=world.groups, written=[])
    model.zero_grad_buffer()
    return model, module


def test_a_small_gradient_that_arrives_twice_is_added_as_often(world: Any) -> None:
    """Two recomputed parts share a vector, behind another one that is waiting already."""
    model, module = small_model(world)
    shared, last = module.vectors[2], module.vectors[0]
    x_BN = torch.ones(3, WIDTH).bfloat16().requires_grad_()
    for _ in range(2):
        hidden_BN = _Twice.apply(_Twice.apply(x_BN, lambda x: x * shared), lambda x: x + shared)
        (hidden_BN * last).sum().backward()
    double = shared.detach().double().requires_grad_()
    ((torch.ones(3, WIDTH) * double + double) * last.detach().double()).sum().backward()
    assert double.grad is not None
    torch.testing.assert_close(shared.main_grad.double(), 2 * double.grad, rtol=0.02, atol=0.02)
    del model


def test_a_backward_that_fails_leaves_nothing(world: Any) -> None:
    model, module = small_model(world)

    def fail(_: Tensor) -> None:
        raise ArithmeticError("on purpose")

    x_BN = torch.ones(3, WIDTH).bfloat16().requires_grad_()
    handle = x_BN.register_hook(fail)
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="on purpose"):
            model(x_BN).backward()
    handle.remove()
    model.zero_grad_buffer()
    model(x_BN).backward()
    found = module.vectors[2].main_grad.clone()
    model.zero_grad_buffer()
    model(x_BN).backward()
    assert found.any() and torch.equal(found, module.vectors[2].main_grad)


def test_all_gradients_of_a_tied_model_are_megatron_cores(world: Any) -> None:
    """Its embedding is small, and megatron-core has marked it."""
    cfg = tiny_run(optimizer={"distributed": False})
    ids_BS = torch.randint(cfg.model.vocab_size, (2, 8), generator=torch.Generator().manual_seed(0))
    found = []
    for kind in (DataParallel, DistributedDataParallel):
        seed_everything(0, world)
        built = build_model(cfg, world)
        written = {"written": []} if kind is DataParallel else {}
        model = kind(built.config, ddp_config(cfg), built.wrapped[0], pg_collection=world.groups, **written)
        model.zero_grad_buffer()
        model(ids_BS, torch.arange(8).expand(2, 8), None, labels=ids_BS.roll(-1, 1)).mean().backward()
        found.append({name: weight.main_grad.clone() for name, weight in built.module.named_parameters()})
    assert any(getattr(weight, "zero_out_wgrad", False) for weight in built.module.parameters())
    assert found[0].keys() == found[1].keys() and all(torch.equal(found[0][name], found[1][name]) for name in found[0])
