"""Gate, LayerNorm and heads by the kernels with the heads on all ranks, against all heads in float64 on each rank."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from egmla_megatron.attention.gate_heads_cuda import gate_heads, gate_norm
from egmla_megatron.attention.head_sizes import HeadSizes
from tests.kernels import gradients, in_float64, leaves, plain_gate_heads, plain_gate_norm, random_gate_norm

SEQUENCE, BATCH, ROWS, HEADS, SIZES = 11, 3, 7, 4, HeadSizes(6, 4, 5)
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 5e-5}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}


def part_of(whole: Tensor, device: str) -> Tensor:
    """This rank's columns."""
    part = whole.detach().chunk(dist.get_world_size(), -1)[dist.get_rank()]
    return part.contiguous().to(device).requires_grad_()


def local(arguments: dict[str, Any], device: str, *shared: str) -> dict[str, Any]:
    """Tensors with a gradient cut into the ranks' columns, all but those that every rank has as a whole."""
    found = dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            whole = value.detach().to(device).requires_grad_(value.requires_grad)
            found[name] = part_of(value, device) if value.requires_grad and name not in shared else whole
    return found


def compare(mine: list[Tensor], whole: list[Tensor], dims: list[int | None], dtype: torch.dtype) -> None:
    """`dims`: along which the ranks' parts lie; None: the ranks' sum."""
    for part, exact, dim in zip(mine, whole, dims, strict=True):
        if dim is None:
            part = part.double()
            dist.all_reduce(part)
        else:
            exact = exact.chunk(dist.get_world_size(), dim)[dist.get_rank()]
        torch.testing.assert_close(part.double(), exact.to(part.device), **CLOSE[dtype])


def draw_weights(out: Tensor, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Of a loss that sums `out`: in float64, but values of `dtype`, so that both sides get the same."""
    return torch.randn(out.shape, generator=generator, dtype=torch.float64).to(dtype).to(out)


def check_norm(device: str, dtype: torch.dtype, gate: str, *, norm: bool, columns: int) -> None:
    """One tensor in and one out."""
    arguments = random_gate_norm(SEQUENCE * BATCH, columns, ROWS, norm=norm, dtype=dtype)
    own, exact = local(arguments, device), in_float64(arguments, device)
    got = gate_norm(**own, gate=gate, group=dist.group.WORLD)
    expected = plain_gate_norm(**exact, gate=gate)
    weights = draw_weights(expected, torch.Generator().manual_seed(1), dtype)
    share = weights.chunk(dist.get_world_size(), -1)[dist.get_rank()].to(dtype)
    found = torch.autograd.grad(got, leaves(own), share)
    whole = torch.autograd.grad(expected, leaves(exact), weights)
    compare([got, *found], [expected, *whole], [-1] * (3 + 2 * norm), dtype)


def check_heads(device: str, dtype: torch.dtype, gate: str) -> None:
    """With queries of the rank's heads and a RoPE key that all ranks share, whose gradient is their sum."""
    norm = random_gate_norm(SEQUENCE * BATCH, HEADS * (SIZES.nope + SIZES.v), ROWS, norm=True, dtype=dtype)
    generator = torch.Generator().manual_seed(2)

    def draw(width: int) -> Tensor:
        return torch.randn(SEQUENCE, BATCH, width, generator=generator).to(dtype).requires_grad_()

    arguments = {
        "q": draw(HEADS * (SIZES.nope + SIZES.rope)),
        "up_SBN": norm["up_TN"].detach().view(SEQUENCE, BATCH, -1).requires_grad_(),
        "gate_UN": norm["gate_UN"],
        "rope_SBR": draw(SIZES.rope),
        "weight_N": norm["weight_N"],
        "bias_N": norm["bias_N"],
    }
    angles_SR = (torch.rand(SEQUENCE, SIZES.rope, generator=generator) * 10).to(device)
    fixed = {"row_map": norm["row_map"].to(device), "eps": 1e-5, "gate": gate, "sizes": SIZES}
    own, exact = local(arguments, device, "rope_SBR"), in_float64(arguments, device)
    size = dist.get_world_size()
    got = gate_heads(**own, **fixed, angles_SR=angles_SR, heads=HEADS // size, group=dist.group.WORLD)
    expected = plain_gate_heads(**exact, **fixed, angles_SR=angles_SR.double(), heads=HEADS)
    weights = [draw_weights(out, generator, dtype) for out in expected]
    shares = [weight.chunk(size, 2)[dist.get_rank()].to(dtype) for weight in weights]
    found = torch.autograd.grad(got, leaves(own), shares)
    whole = torch.autograd.grad(expected, leaves(exact), weights)
    compare([*got, *found], [*expected, *whole], [2, 2, 2, -1, -1, -1, None, -1, -1], dtype)


if __name__ == "__main__":
    cuda = torch.cuda.is_available()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # also for ranks that share a GPU
    place = f"cuda:{dist.get_rank() % torch.cuda.device_count()}" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(place)
    for kind in CLOSE:
        check_heads(place, kind, "mul")
        check_norm(place, kind, "add", norm=True, columns=5 * dist.get_world_size())
        check_norm(place, kind, "mul", norm=False, columns=8 * dist.get_world_size())
    dist.destroy_process_group()
    print("gate over ranks: all compared", flush=True)
    