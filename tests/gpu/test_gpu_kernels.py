"""The Triton kernels on a GPU against float64: bf16 and fp32, real and odd sizes, outputs in memory full of NaN."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.dist.harness import start
from tests.kernels import (
    gradients,
    in_float64,
    leaves,
    plain_gate_heads,
    plain_gate_norm,
    plain_latent_norm,
    plain_split_heads,
    random_gate_norm,
)

pytestmark = pytest.mark.gpu
ERROR = {torch.float32: 2e-6, torch.bfloat16: 8e-3}  # relative, in the norm of a tensor


def poison() -> None:
    """Freed memory that the next outputs will take holds NaN."""
    for size in (1 << 26, 1 << 22, 1 << 18, 1 << 14):
        torch.full((size,), float("nan"), device="cuda")


def assert_close(mine: Tensor, exact: Tensor, error: float) -> None:
    found = float((mine.double() - exact).norm() / exact.norm().clamp_min(1e-9))
    assert found < error, found


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("gate", ["mul", "add"])
@pytest.mark.parametrize("dtype", list(ERROR))
@pytest.mark.parametrize(
    ("tokens", "columns", "rows"), [(4096, 1536, 900), (1000, 4096, 40), (333, 77, 333), (1, 5, 2)]
)
def test_gate_norm(gate: str, norm: bool, dtype: torch.dtype, tokens: int, columns: int, rows: int) -> None:
    from egmla_megatron.attention.gate_heads_cuda import gate_norm

    host = random_gate_norm(tokens, columns, rows, norm=norm, dtype=dtype)
    arguments = {
        name: value.detach().cuda().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
        for name, value in host.items()
    }
    exact = in_float64(arguments, "cuda")
    poison()
    got, expected = gate_norm(**arguments, gate=gate), plain_gate_norm(**exact, gate=gate)
    assert_close(got, expected, ERROR[dtype])
    poison()
    found = gradients(got, leaves(arguments))
    for mine, theirs in zip(found, gradients(expected, leaves(exact)), strict=True):
        assert_close(mine, theirs, ERROR[dtype])
    again = gradients(gate_norm(**arguments, gate=gate), leaves(arguments))
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


@pytest.mark.parametrize("dtype", list(ERROR))
@pytest.mark.parametrize(
    ("sequence", "batch", "heads", "sizes"),
    [(1024, 8, 12, (64, 64, 64)), (512, 2, 16, (128, 64, 128)), (7, 3, 5, (6, 10, 9))],
)
def test_split_heads(dtype: torch.dtype, sequence: int, batch: int, heads: int, sizes: tuple[int, int, int]) -> None:
    """The RoPE key is part of a wider tensor; gradients come in other layouts, as attention kernels leave them."""
    from egmla_megatron.attention.head_sizes import HeadSizes
    from egmla_megatron.attention.split_heads_cuda import split_heads

    widths = HeadSizes(*sizes)
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = [
        torch.randn(sequence, batch, size, device="cuda", generator=generator).to(dtype).requires_grad_()
        for size in (heads * (widths.nope + widths.rope), heads * (widths.nope + widths.v), 7 + widths.rope)
    ]
    frequency_R = 10000.0 ** -(torch.arange(widths.rope, device="cuda") / widths.rope)
    angles_SR = torch.arange(sequence, device="cuda")[:, None] * frequency_R

    def run(function: object, q: Tensor, kv: Tensor, rope: Tensor) -> tuple[Tensor, ...]:
        query, key, value = function(q, kv, rope[..., 7:], angles_SR.to(torch.float32), heads, widths)  # type: ignore[operator]
        return query.transpose(0, 1), key.permute(1, 2, 0, 3), value.transpose(0, 2)

    exact = [x.detach().double().requires_grad_() for x in inputs]
    poison()
    got, expected = run(split_heads, *inputs), run(plain_split_heads, *exact)
    poison()
    pairs = [*zip(got, expected, strict=True)]
    pairs += zip(gradients(got, inputs), gradients(expected, exact), strict=True)
    for mine, theirs in pairs:
        assert_close(mine, theirs, ERROR[dtype] * 5)  # angles are fp32 in both


@pytest.mark.parametrize("dtype", list(ERROR))
@pytest.mark.parametrize(("tokens", "latent", "rope"), [(8192, 128, 64), (8192, 64, 64), (1000, 512, 64), (77, 80, 6)])
def test_latent_norm(dtype: torch.dtype, tokens: int, latent: int, rope: int) -> None:
    from egmla_megatron.attention.latent_norm_cuda import latent_norm

    generator = torch.Generator("cuda").manual_seed(0)
    down = torch.randn(tokens, latent + rope, device="cuda", generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(latent, device="cuda", generator=generator).to(dtype).requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in (down, weight)]
    poison()
    got, expected = latent_norm(down, weight, 1e-6), plain_latent_norm(*exact, 1e-6)
    poison()
    found = gradients(got, [down, weight])
    pairs = [*zip(got, expected, strict=True), *zip(found, gradients(expected, exact), strict=True)]
    for mine, theirs in pairs:
        assert_close(mine, theirs, ERROR[dtype])
    again = gradients(latent_norm(down, weight, 1e-6), [down, weight])
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("dtype", list(ERROR))
@pytest.mark.parametrize(
    ("sequence", "batch", "heads", "sizes"),
    [(512, 8, 12, (64, 64, 64)), (256, 4, 16, (128, 64, 128)), (47, 3, 5, (6, 10, 9))],
)
def test_gate_heads(
    norm: bool, dtype: torch.dtype, sequence: int, batch: int, heads: int, sizes: tuple[int, int, int]
) -> None:
    """Gradients come in other layouts, as attention kernels leave them."""
    from egmla_megatron.attention.gate_heads_cuda import gate_heads
    from egmla_megatron.attention.head_sizes import HeadSizes

    widths = HeadSizes(*sizes)
    tokens, columns = sequence * batch, heads * (widths.nope + widths.v)
    given = random_gate_norm(tokens, columns, tokens // 5 + 2, norm=norm, dtype=dtype)
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(size: int) -> Tensor:
        return torch.randn(sequence, batch, size, device="cuda", generator=generator).to(dtype).requires_grad_()

    def moved(x: Tensor | None, *shape: int) -> Tensor | None:
        return None if x is None else x.detach().cuda().view(*(shape or x.shape)).requires_grad_()

    arguments = {
        "q": draw(heads * (widths.nope + widths.rope)),
        "up_SBN": moved(given["up_TN"], sequence, batch, columns),
        "gate_UN": moved(given["gate_UN"]),
        "rope_SBR": draw(widths.rope),
        "weight_N": moved(given["weight_N"]),
        "bias_N": moved(given["bias_N"]),
        "row_map": given["row_map"].cuda(),
    }
    frequency_R = 10000.0 ** -(torch.arange(widths.rope, device="cuda") / widths.rope)
    angles_SR = torch.arange(sequence, device="cuda")[:, None] * frequency_R

    def run(function: object, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
        query, key, value = function(**tensors, angles_SR=angles_SR, eps=1e-5, gate="mul", heads=heads, sizes=widths)  # type: ignore[operator]
        return query.transpose(0, 1), key.permute(1, 2, 0, 3), value.transpose(0, 2)

    exact = in_float64(arguments, "cuda")
    poison()
    got, expected = run(gate_heads, arguments), run(plain_gate_heads, exact)
    poison()
    found = gradients(got, leaves(arguments))
    pairs = [*zip(got, expected, strict=True), *zip(found, gradients(expected, leaves(exact)), strict=True)]
    for mine, theirs in pairs:
        assert_close(mine, theirs, ERROR[dtype])
    again = gradients(run(gate_heads, arguments), leaves(arguments))
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


def test_gate_with_heads_on_two_ranks(tmp_path: Path) -> None:
    """Which may share the GPU; fp32 and bf16."""
    output = start(2, ["tests/dist/gate_over_tp_worker.py"], tmp_path / "log").succeed()
    assert output.count("gate over ranks: all compared") == 2
