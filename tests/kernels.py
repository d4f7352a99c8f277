"""What the fused kernels must compute, in plain torch, and random inputs for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from egmla_megatron.attention.sum_by_row import pack_row_map


def random_gate_norm(
    tokens: int, columns: int, rows: int, *, norm: bool, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Arguments of `gate_norm` without `gate`: row 0 has a third of the tokens, the last row none."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()

    index_T = torch.randint(rows - 1, (tokens,), generator=generator)
    index_T[torch.rand(tokens, generator=generator) < 0.33] = 0
    weights = {"weight_N": draw(columns), "bias_N": draw(columns)} if norm else {"weight_N": None, "bias_N": None}
    return {
        "up_TN": draw(tokens, columns),
        "gate_UN": draw(rows, columns),
        "row_map": pack_row_map(index_T, rows),
        "eps": 1e-5,
        **weights,
    }


def plain_gate_norm(
    up_TN: Tensor, gate_UN: Tensor, row_map: Tensor, weight_N: Any, bias_N: Any, eps: float, gate: str
) -> Tensor:
    """`gate_norm` by single operations."""
    gates_TN = gate_UN[row_map[: len(up_TN)]]
    out_TN = up_TN * gates_TN if gate == "mul" else up_TN + gates_TN
    return (
        out_TN if weight_N is None else torch.nn.functional.layer_norm(out_TN, up_TN.shape[1:], weight_N, bias_N, eps)
    )


def plain_split_heads(q: Tensor, kv: Tensor, rope_SBR: Tensor, angles_SR: Tensor, heads: int, sizes: Any) -> Any:
    """`split_heads` by single operations."""

    def rotate(x: Tensor) -> Tensor:
        angle = angles_SR[:, None, None, : sizes.rope // 2].to(x.dtype)
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.cat([even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin()], -1)

    q, kv = q.unflatten(2, (heads, -1)), kv.unflatten(2, (heads, -1))
    shared = rotate(rope_SBR[:, :, None]).expand(-1, -1, heads, -1)
    query = torch.cat([q[..., : sizes.nope], rotate(q[..., sizes.nope :])], -1)
    return query, torch.cat([kv[..., : sizes.nope], shared], -1), kv[..., sizes.nope :]


def plain_gate_heads(
    q: Tensor, up_SBN: Tensor, gate_UN: Tensor, rope_SBR: Tensor, weight_N: Any, bias_N: Any, row_map: Tensor,
    angles_SR: Tensor, eps: float, gate: str, heads: int, sizes: Any,
) -> Any:  # fmt: skip
    """`gate_heads` by single operations."""
    kv_TN = plain_gate_norm(up_SBN.flatten(0, 1), gate_UN, row_map, weight_N, bias_N, eps, gate)
    return plain_split_heads(q, kv_TN.view_as(up_SBN), rope_SBR, angles_SR, heads, sizes)


def plain_latent_norm(down: Tensor, weight_L: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`latent_norm` by single operations."""
    x = down[..., : len(weight_L)]
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight_L, down[..., len(weight_L) :]


def gradients(outputs: Any, inputs: list[Tensor], seed: int = 1) -> list[Tensor]:
    """Of a random weighting of the outputs."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out) for out in outputs]
    return list(torch.autograd.grad(outputs, inputs, weights))


def in_float64(arguments: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """The same values as leaves in float64; maps and numbers as they are."""
    return {
        name: value.detach().to(device, torch.float64).requires_grad_()
        if isinstance(value, Tensor) and value.is_floating_point()
        else value.to(device)
        if isinstance(value, Tensor)
        else value
        for name, value in arguments.items()
    }


def leaves(arguments: dict[str, Any]) -> list[Tensor]:
    """The arguments that have gradients."""
    return [value for value in arguments.values() if isinstance(value, Tensor) and value.requires_grad]
