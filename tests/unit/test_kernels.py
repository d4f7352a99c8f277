"""The Triton kernels against float64, here by Triton's interpreter; on a GPU by tests/gpu/test_gpu_kernels.py."""

from __future__ import annotations

import pytest
import torch

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

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("there is a GPU: tests/gpu has these", allow_module_level=True)

from egmla_megatron.attention import gate_sums_cuda
from egmla_megatron.attention.gate_heads_cuda import gate_heads, gate_norm
from egmla_megatron.attention.gate_parts_cuda import KERNEL_GATES
from egmla_megatron.attention.head_sizes import HeadSizes
from egmla_megatron.attention.latent_norm_cuda import TILE, TILES, latent_norm
from egmla_megatron.attention.split_heads_cuda import split_heads


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("gate", KERNEL_GATES)
@pytest.mark.parametrize(("tokens", "columns", "rows"), [(70, 24, 9), (5, 33, 3), (48, 16, 2)])
def test_gate_norm(gate: str, norm: bool, tokens: int, columns: int, rows: int) -> None:
    """Rows within a block of tokens, over several blocks, of one token and of none."""
    compare_gate_norm(gate, norm, tokens, columns, rows)


def test_gate_norm_of_a_frequent_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """In more blocks than the kernel that adds them reads at once, with more rows and columns than a program has."""
    for name, size in (("COLUMNS", 16), ("NORM_COLUMNS", 16), ("PARTS", 8)):
        monkeypatch.setattr(gate_sums_cuda, name, size)
    compare_gate_norm("mul", True, 900, 40, 60)


def compare_gate_norm(gate: str, norm: bool, tokens: int, columns: int, rows: int) -> None:
    arguments = random_gate_norm(tokens, columns, rows, norm=norm)
    exact = in_float64(arguments)
    got, expected = gate_norm(**arguments, gate=gate), plain_gate_norm(**exact, gate=gate)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(gradients(got, leaves(arguments)), gradients(expected, leaves(exact)), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("sizes", [HeadSizes(6, 4, 5), HeadSizes(8, 2, 8)])
def test_split_heads(sizes: HeadSizes) -> None:
    """Heads of no power of two, a RoPE key that is part of a wider tensor, gradients in another layout."""
    generator = torch.Generator().manual_seed(0)
    sequence, batch, heads = 5, 3, 3
    arguments = {
        name: torch.randn(sequence, batch, size, generator=generator).requires_grad_()
        for name, size in (
            ("q", heads * (sizes.nope + sizes.rope)),
            ("kv", heads * (sizes.nope + sizes.v)),
            ("rope", 7 + sizes.rope),
        )
    }
    angles_SR = torch.rand(sequence, sizes.rope, generator=generator) * 1000

    def run(function, q, kv, rope):
        query, key, value = function(q, kv, rope[..., 7:], angles_SR.to(q.dtype), heads, sizes)
        return query.transpose(0, 1), key.transpose(1, 2), value.transpose(0, 2)

    exact = in_float64(arguments)
    got, expected = run(split_heads, **arguments), run(plain_split_heads, **exact)
    pairs = [*zip(got, expected, strict=True)]
    pairs += zip(gradients(got, leaves(arguments)), gradients(expected, leaves(exact)), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=2e-4)  # cos of 1000 radians in fp32


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("gate", KERNEL_GATES)
@pytest.mark.parametrize("sizes", [HeadSizes(6, 4, 5), HeadSizes(8, 2, 8)])
def test_gate_heads(gate: str, norm: bool, sizes: HeadSizes) -> None:
    """Gradients come in other layouts, as attention kernels leave them, or with gaps."""
    generator = torch.Generator().manual_seed(0)
    sequence, batch, heads = 25, 3, 3
    given = random_gate_norm(sequence * batch, heads * (sizes.nope + sizes.v), 9, norm=norm)
    arguments = {
        "q": torch.randn(sequence, batch, heads * (sizes.nope + sizes.rope), generator=generator).requires_grad_(),
        "up_SBN": given["up_TN"].detach().view(sequence, batch, -1).requires_grad_(),
        "gate_UN": given["gate_UN"],
        "rope_SBR": torch.randn(sequence, batch, sizes.rope, generator=generator).requires_grad_(),
        "weight_N": given["weight_N"],
        "bias_N": given["bias_N"],
    }
    angles_SR = torch.rand(sequence, sizes.rope, generator=generator) * 10

    def run(function, **given_tensors):
        angles = angles_SR.to(given_tensors["q"].dtype)
        query, key, value = function(
            **given_tensors, row_map=given["row_map"], angles_SR=angles, eps=1e-5, gate=gate, heads=heads, sizes=sizes
        )
        return query.transpose(0, 1), key.transpose(1, 2), value.transpose(2, 3)

    exact = in_float64(arguments)
    got, expected = run(gate_heads, **arguments), run(plain_gate_heads, **exact)
    pairs = [*zip(got, expected, strict=True)]
    pairs += zip(gradients(got, leaves(arguments)), gradients(expected, leaves(exact)), strict=True)
    assert len(pairs) == 3 + 4 + 2 * norm
    for mine, theirs in pairs:
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize(("latent", "rope"), [(16, 4), (48, 6), (5, 3)])
@pytest.mark.parametrize("tokens", [1, 1000])
def test_latent_norm(tokens: int, latent: int, rope: int) -> None:
    """Several programs in backward, the last one cut; widths of no power of two; a strided gradient."""
    assert tokens == 1 or tokens * 64 > TILE * TILES
    generator = torch.Generator().manual_seed(tokens)
    arguments = {
        "down": torch.randn(tokens, 1, latent + rope, generator=generator).requires_grad_(),
        "weight_L": torch.randn(latent, generator=generator).requires_grad_(),
        "eps": 1e-3,
    }

    def run(function, **given):
        normed, key = function(**given)
        return normed.transpose(0, 1), key.transpose(0, 1)

    exact = in_float64(arguments)
    got, expected = run(latent_norm, **arguments), run(plain_latent_norm, **exact)
    pairs = [*zip(got, expected, strict=True)]
    pairs += zip(gradients(got, leaves(arguments)), gradients(expected, leaves(exact)), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=2e-5)
