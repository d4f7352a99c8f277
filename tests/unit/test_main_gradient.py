"""A linear map that adds its weight's gradient to the main gradient, against torch's under megatron-core's hook."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from egmla_megatron.attention.main_gradient import linear, linear_beside, put_product
from tests.unit.test_table_lookup import hooked

R, K, N = 7, 5, 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("overwrite", [True, False])
def test_micro_batches_add_up(overwrite: bool) -> None:
    weight, seen = hooked(drawn(N, K, seed=0), torch.float32)
    plain: Any = torch.nn.Parameter(weight.detach().clone())
    if overwrite:
        weight.main_grad.fill_(torch.nan)  # of the step before
    for micro_batch in range(2):
        weight.overwrite_main_grad = overwrite and micro_batch == 0
        x, factors = drawn(R, K, seed=micro_batch).requires_grad_(), drawn(R, N, seed=9 + micro_batch)
        other = x.detach().clone().requires_grad_()
        got = linear(x, weight, fused=True)
        weight.overwrite_main_grad = False  # what counts is what forward saw
        got.backward(factors)
        (other @ plain.t()).backward(factors)
        torch.testing.assert_close(x.grad, other.grad)
    torch.testing.assert_close(weight.main_grad, plain.grad)
    assert seen == [True, True] and weight.grad is None


@pytest.mark.parametrize(("fused", "main"), [(False, True), (True, False)])
def test_otherwise_the_gradient_is_a_tensor(fused: bool, main: bool) -> None:
    weight: Any = torch.nn.Parameter(drawn(N, K, seed=0))
    if main:
        weight.main_grad = torch.zeros_like(weight)
    x = drawn(R, K, seed=1)
    linear(x, weight, fused=fused).sum().backward()
    torch.testing.assert_close(weight.grad, x.sum(0).expand(N, K))
    assert not main or not weight.main_grad.any()


def test_frozen_weights_get_none() -> None:
    weight, _ = hooked(drawn(N, K, seed=0), torch.float32)
    weight.requires_grad_(False)
    x = drawn(R, K, seed=1).requires_grad_()
    linear(x, weight, fused=True).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(R, K))
    assert not weight.main_grad.any() and weight.grad is None


@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU multiplies bf16 into bf16 alone")
@pytest.mark.parametrize("overwrite", [True, False])
def test_bf16_factors_into_fp32(overwrite: bool) -> None:
    left, right = drawn(200, 300, seed=0, dtype=torch.bfloat16), drawn(300, 100, seed=1, dtype=torch.bfloat16)
    main = drawn(200, 100, seed=2)
    exact = left.double() @ right.double() + (0 if overwrite else main.double())
    put_product(main, left, right, overwrite=overwrite)
    torch.testing.assert_close(main.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("overwrite", [True, False])
def test_beside_another_reader(overwrite: bool) -> None:
    """Of more dimensions, and not contiguous."""
    weight, seen = hooked(drawn(N, K, seed=0), torch.float32)
    weight.overwrite_main_grad = overwrite
    if overwrite:
        weight.main_grad.fill_(torch.nan)
    plain: Any = torch.nn.Parameter(weight.detach().clone())
    other = drawn(K, N + 1, seed=1)
    factors = drawn(2, R, N, seed=2), drawn(2, R, N + 1, seed=3)
    start = drawn(K, R, 2, seed=4)
    x, same = start.clone().requires_grad_(), start.clone().requires_grad_()
    through, out = linear_beside((2 * x).permute(2, 1, 0), weight)
    torch.autograd.backward((out, through @ other), factors)
    given = (2 * same).permute(2, 1, 0)
    torch.autograd.backward((given @ plain.t(), given @ other), factors)
    torch.testing.assert_close(out, given @ plain.t())
    torch.testing.assert_close(x.grad, same.grad)
    torch.testing.assert_close(weight.main_grad, plain.grad)
    assert seen == [True] and weight.grad is None
