"""AdamW on tensors of any number in one Triton kernel; imported where there is a GPU only.

Whether to update at all, the clipping factor and the bias corrections are read from the device: the host, which knows
the gradient's norm only when the device is done, need not wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["AdamTable", "AdamTensors", "adam_tables", "adamw", "decide"]

# C pieces of at most PIECE elements

PIECE = 65536  # elements that one row of the table stands for
BLOCK = 4096  # elements of one program: 3.92 TB/s on an H200, 1024 and 2048 3.82 and 3.64
PLAN = 4  # numbers of a plan: factor on gradients, 1 - beta1^t, 1 - beta2^t, 1 or 0: update or leave alone
_ALIGNMENT = 16  # bytes that a thread reads at once


@triton.jit
def _decide(norm_ptr, beta_ptr, count_ptr, plan_ptr, clip):
    norm = tl.load(norm_ptr)
    finite = norm < float("inf")  # false for NaN, too
    count = tl.load(count_ptr) + finite.to(tl.int64)
    factor = tl.where(clip > 0.0, tl.minimum(clip / (norm + 1e-6), 1.0), 1.0)
    first, second = tl.load(beta_ptr), tl.load(beta_ptr + 1)
    steps = count.to(tl.float64)
    tl.store(count_ptr, count)
    tl.store(plan_ptr, factor)
    tl.store(plan_ptr + 1, (1.0 - tl.exp(steps * tl.log(first))).to(tl.float32))
    tl.store(plan_ptr + 2, (1.0 - tl.exp(steps * tl.log(second))).to(tl.float32))
    tl.store(plan_ptr + 3, finite.to(tl.float32))


@triton.jit
def _at(table_ptr, index: tl.constexpr, KIND: tl.constexpr):
    return tl.load(table_ptr + index).to(tl.pointer_type(KIND))


@triton.jit
def read(at, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(at, mask=mask, other=0.0)
    else:
        return tl.load(at)


@triton.jit
def write(at, value, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(at, value, mask=mask)
    else:
        tl.store(at, value)


@triton.jit
def read_master(weight_at, master_at, mask, MASKED: tl.constexpr):
    """The fp32 master weight, or the one whose lower 16 bits stand at `master_at`: as in Transformer Engine's Adam the
    bf16 weight is its upper half, rounded to nearest, halves away from zero."""
    if master_at.dtype.element_ty == tl.int16:
        low = read(master_at, mask, MASKED)
        high = read(weight_at, mask, MASKED).to(tl.int16, bitcast=True).to(tl.int32) - (low < 0).to(tl.int32)
        return ((high << 16) | (low.to(tl.int32) & 0xFFFF)).to(tl.float32, bitcast=True)
    else:
        return read(master_at, mask, MASKED)


@triton.jit
def write_master(weight_at, master_at, master, mask, MASKED: tl.constexpr):
    """And the weight that follows from it."""
    if master_at.dtype.element_ty == tl.int16:
        bits = master.to(tl.int32, bitcast=True)
        low = bits.to(tl.int16)
        high = ((bits >> 16) + (low < 0).to(tl.int32)).to(tl.int16)
        write(master_at, low, mask, MASKED)
        write(weight_at, high.to(tl.bfloat16, bitcast=True), mask, MASKED)
    else:
        write(master_at, master, mask, MASKED)
        write(weight_at, master.to(weight_at.dtype.element_ty), mask, MASKED)


@triton.jit
def updated(grad, mean, square, master, beta1, beta2, eps, rate, inverse2, decay):
    """Moments and weight after one update. rate: lr / (1 - beta1^t); inverse2: 1 / (1 - beta2^t); decay: times lr."""
    # fma where a compiler would choose: every kernel with these lines rounds alike
    mean = tl.fma(beta1, mean, (1.0 - beta1) * grad)
    square = tl.fma(beta2, square, (1.0 - beta2) * grad * grad)
    master -= tl.fma(decay, master, rate * mean / (tl.sqrt(square * inverse2) + eps))
    return mean, square, master


@triton.jit
def _update(
    table_ptr, plan_ptr, place, size, lr, beta1, beta2, eps, decay,
    GRAD: tl.constexpr, WEIGHT: tl.constexpr, MASTER: tl.constexpr, ALIGNED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    mask = place < size
    grad_at, weight_at = _at(table_ptr, 0, GRAD) + place, _at(table_ptr, 1, WEIGHT) + place
    mean_at, square_at = _at(table_ptr, 2, tl.float32) + place, _at(table_ptr, 3, tl.float32) + place
    master_at = _at(table_ptr, 4, MASTER) + place
    if ALIGNED:  # the compiler, which cannot know, then reads 16 bytes a thread at once
        grad_at, weight_at = tl.multiple_of(grad_at, 16), tl.multiple_of(weight_at, 16)
        mean_at, square_at = tl.multiple_of(mean_at, 16), tl.multiple_of(square_at, 16)
        master_at = tl.multiple_of(master_at, 16)
    factor, rate, inverse2 = tl.load(plan_ptr), lr / tl.load(plan_ptr + 1), 1.0 / tl.load(plan_ptr + 2)
    grad = read(grad_at, mask, MASKED).to(tl.float32) * factor
    mean, square = read(mean_at, mask, MASKED), read(square_at, mask, MASKED)
    master = read_master(weight_at, master_at, mask, MASKED)
    mean, square, master = updated(grad, mean, square, master, beta1, beta2, eps, rate, inverse2, lr * decay)
    write(mean_at, mean, mask, MASKED)
    write(square_at, square, mask, MASKED)
    write_master(weight_at, master_at, master, mask, MASKED)


@triton.jit
def _adamw(
    table_ptr, plan_ptr, lr, beta1, beta2, eps, decay,
    GRAD: tl.constexpr, WEIGHT: tl.constexpr, MASTER: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    table_ptr += tl.program_id(0) * 6
    first = tl.program_id(1) * BLOCK
    place = first + tl.arange(0, BLOCK)
    size = tl.load(table_ptr + 5)
    if tl.load(plan_ptr + 3) > 0.0:
        if first + BLOCK <= size:
            _update(
                table_ptr, plan_ptr, place, size, lr, beta1, beta2, eps, decay,
                GRAD=GRAD, WEIGHT=WEIGHT, MASTER=MASTER, ALIGNED=ALIGNED, MASKED=False,
            )  # fmt: skip
        elif first < size:
            _update(
                table_ptr, plan_ptr, place, size, lr, beta1, beta2, eps, decay,
                GRAD=GRAD, WEIGHT=WEIGHT, MASTER=MASTER, ALIGNED=ALIGNED, MASKED=True,
            )  # fmt: skip


# gradient, weight, both moments, master weight: fp32, or int16, the lower half of the one whose upper is a bf16 weight
AdamTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class AdamTable:
    """Where tensors of one parameter group lie; as long as they do."""

    rows_C6: Tensor  # on the device: addresses of gradient, weight, moments and master weight, elements
    grad: torch.dtype
    weight: torch.dtype
    master: torch.dtype
    aligned: bool


def adam_tables(tensors: Sequence[AdamTensors]) -> tuple[AdamTable, ...]:
    """For the tensors of parameters, five of equal size each, all contiguous: those that can be read 16 bytes at once,
    and those that cannot, such as what a rank has of a parameter that begins in another one's share.

    Moments are fp32; gradients are of one type, weights of another or the same, master weights of one (`AdamTensors`).

    Raises:
        ValueError: types or sizes that do not fit together.
    """
    rows = []
    grad, weight, *_, master = (each.dtype for each in tensors[0])
    halves = master == torch.int16 and weight == torch.bfloat16
    wanted = (grad, weight, torch.float32, torch.float32, torch.int16 if halves else torch.float32)
    for group in tensors:
        if tuple(each.dtype for each in group) != wanted or len({each.numel() for each in group}) != 1:
            got = [(each.dtype, each.numel()) for each in group]
            raise ValueError(
                f"AdamW: got tensors of {got}, allowed {wanted} of one size; moments and master weights are fp32, "
                "master weights beside bf16 weights int16, too"
            )
        if not all(each.is_contiguous() for each in group):
            raise ValueError("AdamW: got a tensor with gaps, allowed contiguous ones")
        for start in range(0, group[0].numel(), PIECE):
            addresses = [each.data_ptr() + start * each.element_size() for each in group]
            rows.append([*addresses, min(PIECE, group[0].numel() - start)])
    table = torch.tensor(rows, dtype=torch.int64)
    aligned_C = (table[:, :5] % _ALIGNMENT == 0).all(1)
    device = tensors[0][1].device
    return tuple(
        AdamTable(table[mine_C].to(device), grad, weight, master, aligned)
        for aligned, mine_C in ((True, aligned_C), (False, ~aligned_C))
        if mine_C.any()
    )


KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.int16: tl.int16}


def decide(norm_1: Tensor, betas_2: Tensor, count_1: Tensor, plan_4: Tensor, clip: float) -> None:
    """Fill a plan on the device, and count the update in where the norm is finite.

    Args:
        norm_1: the gradient's, fp32; betas_2: of Adam, fp64; count_1: updates so far, int64.
        clip: largest norm, 0: no clipping.
    """
    _decide[(1,)](norm_1, betas_2, count_1, plan_4, float(clip))


def adamw(
    table: AdamTable, plan_4: Tensor, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> None:
    """One update in place, as Loshchilov and Hutter's AdamW: decay is apart from the gradient."""
    grid = (len(table.rows_C6), triton.cdiv(PIECE, BLOCK))
    _adamw[grid](
        table.rows_C6, plan_4, float(lr), *map(float, betas), float(eps), float(weight_decay),
        GRAD=KINDS[table.grad], WEIGHT=KINDS[table.weight], MASTER=KINDS[table.master],
        ALIGNED=table.aligned, BLOCK=BLOCK,
    )  # fmt: skip
