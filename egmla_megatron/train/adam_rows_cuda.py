"""AdamW on the rows of a table that a step read, in Triton kernels; the other rows' updates wait until they are read.

A row that no token of a step uses has a gradient of zero: its update is known without looking at it. So it is made
later, from the history of learning rates and bias corrections, by the same arithmetic in the same order. Imported where
there is a GPU only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from egmla_megatron.train.adam_cuda import KINDS, read, updated, write

__all__ = ["SWEEP", "RowTensors", "Rows", "advance_all", "catch_up", "row_squares", "update_rows"]

# V rows of N columns, R rows that are looked up, H = SWEEP updates that are remembered

# steps in which every row is updated at least once, and updates that are remembered: a row lacks at most one fewer
SWEEP = 128
STRIDE = 16  # rows a program looks at, far apart: the ids of common tokens are neighbours
MOST = 1024  # columns at once


@triton.jit
def _advance(
    history_ptr, weight_ptr, mean_ptr, square_ptr, master_ptr, grad_ptr, plan_ptr, place, mask, first, last, was_read,
    lr, beta1, beta2, eps, decay,
    PLANNED: tl.constexpr, WEIGHT: tl.constexpr, SWEEP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    # updates first to last without gradient; with PLANNED one more, with the gradient of a row that was read
    mean, square = read(mean_ptr + place, mask, MASKED), read(square_ptr + place, mask, MASKED)
    master = read(master_ptr + place, mask, MASKED)
    update = first
    while update <= last:
        slot = history_ptr + (update % SWEEP) * 3
        mean, square, master = updated(
            0.0, mean, square, master, beta1, beta2, eps, tl.load(slot), tl.load(slot + 1), tl.load(slot + 2)
        )
        update += 1
    if PLANNED:
        factor, rate, inverse2 = tl.load(plan_ptr), lr / tl.load(plan_ptr + 1), 1.0 / tl.load(plan_ptr + 2)
        grad = tl.zeros_like(mean)
        if was_read:
            grad = read(grad_ptr + place, mask, MASKED).to(tl.float32) * factor
        mean, square, master = updated(grad, mean, square, master, beta1, beta2, eps, rate, inverse2, lr * decay)
    write(mean_ptr + place, mean, mask, MASKED)
    write(square_ptr + place, square, mask, MASKED)
    write(master_ptr + place, master, mask, MASKED)
    write(weight_ptr + place, master.to(WEIGHT), mask, MASKED)


@triton.jit
def _complete(
    row, count_ptr, done_ptr, history_ptr, weight_ptr, mean_ptr, square_ptr, master_ptr, beta1, beta2, eps,
    COLUMNS: tl.constexpr, WEIGHT: tl.constexpr, SWEEP: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    count, done = tl.load(count_ptr), tl.load(done_ptr + row)
    if done < count:
        for start in range(0, COLUMNS, BLOCK):
            place = start + tl.arange(0, BLOCK)
            _advance(
                history_ptr, weight_ptr, mean_ptr, square_ptr, master_ptr, weight_ptr, history_ptr,
                row * COLUMNS + place, place < COLUMNS, done + 1, count, False,
                0.0, beta1, beta2, eps, 0.0, PLANNED=False, WEIGHT=WEIGHT, SWEEP=SWEEP, MASKED=MASKED,
            )  # fmt: skip
        tl.debug_barrier()  # all threads have read it
        tl.store(done_ptr + row, count)


@triton.jit
def _catch_up(
    ids_ptr, count_ptr, done_ptr, read_ptr, history_ptr, weight_ptr, mean_ptr, square_ptr, master_ptr, rows,
    beta1, beta2, eps,
    COLUMNS: tl.constexpr, WEIGHT: tl.constexpr, SWEEP: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.load(ids_ptr + tl.program_id(0)).to(tl.int64)
    row = tl.minimum(tl.maximum(row, 0), rows - 1)  # the look-up itself refuses others
    if tl.atomic_xchg(read_ptr + row, 1) == 0:  # else another program or an earlier look-up of the step has it
        _complete(
            row, count_ptr, done_ptr, history_ptr, weight_ptr, mean_ptr, square_ptr, master_ptr, beta1, beta2, eps,
            COLUMNS=COLUMNS, WEIGHT=WEIGHT, SWEEP=SWEEP, MASKED=MASKED, BLOCK=BLOCK,
        )  # fmt: skip


@triton.jit
def _advance_all(
    count_ptr, done_ptr, history_ptr, weight_ptr, mean_ptr, square_ptr, master_ptr, beta1, beta2, eps,
    COLUMNS: tl.constexpr, WEIGHT: tl.constexpr, SWEEP: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    _complete(
        tl.program_id(0).to(tl.int64), count_ptr, done_ptr, history_ptr, weight_ptr, mean_ptr, square_ptr, master_ptr,
        beta1, beta2, eps, COLUMNS=COLUMNS, WEIGHT=WEIGHT, SWEEP=SWEEP, MASKED=MASKED, BLOCK=BLOCK,
    )  # fmt: skip


@triton.jit
def _update_row(
    row, was_read, plan_ptr, count_ptr, done_ptr, history_ptr, grad_ptr, weight_ptr, mean_ptr, square_ptr, master_ptr,
    lr, beta1, beta2, eps, decay,
    COLUMNS: tl.constexpr, WEIGHT: tl.constexpr, SWEEP: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(plan_ptr + 3) > 0.0:
        count, done = tl.load(count_ptr), tl.load(done_ptr + row)
        for start in range(0, COLUMNS, BLOCK):
            place = start + tl.arange(0, BLOCK)
            _advance(
                history_ptr, weight_ptr, mean_ptr, square_ptr, master_ptr, grad_ptr, plan_ptr,
                row * COLUMNS + place, place < COLUMNS, done + 1, count - 1, was_read,
                lr, beta1, beta2, eps, decay, PLANNED=True, WEIGHT=WEIGHT, SWEEP=SWEEP, MASKED=MASKED,
            )  # fmt: skip
        tl.debug_barrier()  # all threads have read it
        tl.store(done_ptr + row, count)
    else:
        _complete(
            row, count_ptr, done_ptr, history_ptr, weight_ptr, mean_ptr, square_ptr, master_ptr, beta1, beta2, eps,
            COLUMNS=COLUMNS, WEIGHT=WEIGHT, SWEEP=SWEEP, MASKED=MASKED, BLOCK=BLOCK,
        )  # fmt: skip
    if was_read:
        for start in range(0, COLUMNS, BLOCK):
            place = start + tl.arange(0, BLOCK)
            zeros = tl.zeros((BLOCK,), grad_ptr.dtype.element_ty)
            write(grad_ptr + row * COLUMNS + place, zeros, place < COLUMNS, MASKED)


@triton.jit(do_not_specialize=["phase"])
def _update_rows(
    plan_ptr, count_ptr, done_ptr, read_ptr, history_ptr, grad_ptr, weight_ptr, mean_ptr, square_ptr, master_ptr,
    rows, phase, lr, beta1, beta2, eps, decay,
    COLUMNS: tl.constexpr, WEIGHT: tl.constexpr, SWEEP: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
):  # fmt: skip
    if tl.program_id(0) == 0 and tl.load(plan_ptr + 3) > 0.0:
        slot = history_ptr + (tl.load(count_ptr) % SWEEP) * 3
        tl.store(slot, lr / tl.load(plan_ptr + 1))
        tl.store(slot + 1, 1.0 / tl.load(plan_ptr + 2))
        tl.store(slot + 2, lr * decay)
    for index in range(STRIDE):
        row = (tl.program_id(0) + index * tl.num_programs(0)).to(tl.int64)
        if row < rows:
            was_read = tl.load(read_ptr + row) != 0
            if was_read | (row % SWEEP == phase):
                _update_row(
                    row, was_read, plan_ptr, count_ptr, done_ptr, history_ptr, grad_ptr, weight_ptr, mean_ptr,
                    square_ptr, master_ptr, lr, beta1, beta2, eps, decay,
                    COLUMNS=COLUMNS, WEIGHT=WEIGHT, SWEEP=SWEEP, MASKED=MASKED, BLOCK=BLOCK,
                )  # fmt: skip
                tl.debug_barrier()
                tl.store(read_ptr + row, 0)


@triton.jit
def _row_squares(
    read_ptr, grad_ptr, sums_ptr, rows,
    COLUMNS: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    total = 0.0
    for index in range(STRIDE):
        row = (tl.program_id(0) + index * tl.num_programs(0)).to(tl.int64)
        if tl.load(read_ptr + row, mask=row < rows, other=0) != 0:
            for start in range(0, COLUMNS, BLOCK):
                place = start + tl.arange(0, BLOCK)
                grad = read(grad_ptr + row * COLUMNS + place, place < COLUMNS, MASKED).to(tl.float32)
                total += tl.sum(grad * grad)
    tl.store(sums_ptr + tl.program_id(0), total)


RowTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # gradient, weight, both moments, master weight: all [V, N]


@dataclass(frozen=True)
class Rows:
    """What is known of the rows of a table."""

    done_V: Tensor  # int64, updates that the row has had
    read_V: Tensor  # int32, 1: looked up since the last update, and up to date
    history_H3: Tensor  # fp32, of update t at t % H: lr / (1 - beta1^t), 1 / (1 - beta2^t), lr * weight decay

    @staticmethod
    def of(rows: int, device: torch.device, sweep: int = SWEEP) -> Rows:
        """Of a table on which no update was made, and whose every row is updated once in `sweep` steps at least."""
        return Rows(
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.zeros(sweep, 3, dtype=torch.float32, device=device),
        )

    @property
    def sweep(self) -> int:
        """H."""
        return len(self.history_H3)


def _columns(columns: int) -> dict[str, int | bool]:
    block = min(MOST, triton.next_power_of_2(columns))
    return {"COLUMNS": columns, "BLOCK": block, "MASKED": columns % block != 0}


def catch_up(
    rows: Rows, tensors: RowTensors, ids_R: Tensor, count_1: Tensor, *, betas: tuple[float, float], eps: float
) -> None:
    """Make the updates that the rows `ids_R`, about to be looked up, lack, and mark them as read; ids may repeat.

    Args:
        count_1: updates so far, int64.
    """
    _, weight, mean, square, master = tensors
    size, columns = weight.shape
    _catch_up[(len(ids_R),)](
        ids_R, count_1, rows.done_V, rows.read_V, rows.history_H3, weight, mean, square, master, size,
        *map(float, betas), float(eps), WEIGHT=KINDS[weight.dtype], SWEEP=rows.sweep, **_columns(columns),
    )  # fmt: skip


def update_rows(
    rows: Rows,
    tensors: RowTensors,
    count_1: Tensor,
    plan_4: Tensor,
    phase: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One update in place, as planned, of the rows that were read, whose gradients are zeroed, and those that are due.

    Args:
        count_1: updates with this one, if it is made, int64.
        plan_4: see `adam_cuda`.
        phase: of the rows that are due, row % H; every one of them once in H calls.
    """
    grad, weight, mean, square, master = tensors
    size, columns = weight.shape
    _update_rows[(triton.cdiv(size, STRIDE),)](
        plan_4, count_1, rows.done_V, rows.read_V, rows.history_H3, grad, weight, mean, square, master,
        size, phase, float(lr), *map(float, betas), float(eps), float(weight_decay),
        WEIGHT=KINDS[weight.dtype], SWEEP=rows.sweep, STRIDE=STRIDE, **_columns(columns),
    )  # fmt: skip


def advance_all(rows: Rows, tensors: RowTensors, count_1: Tensor, *, betas: tuple[float, float], eps: float) -> None:
    """Make the updates that rows of the table lack."""
    _, weight, mean, square, master = tensors
    size, columns = weight.shape
    _advance_all[(size,)](
        count_1, rows.done_V, rows.history_H3, weight, mean, square, master, *map(float, betas), float(eps),
        WEIGHT=KINDS[weight.dtype], SWEEP=rows.sweep, **_columns(columns),
    )  # fmt: skip


def row_squares(rows: Rows, grad_VN: Tensor) -> Tensor:
    """Sum of squares of the gradient [1], fp32: of the rows that were read, the others have none."""
    size, columns = grad_VN.shape
    sums = torch.empty(triton.cdiv(size, STRIDE), dtype=torch.float32, device=grad_VN.device)
    _row_squares[(len(sums),)](rows.read_V, grad_VN, sums, size, STRIDE=STRIDE, **_columns(columns))
    return sums.sum().reshape(1)
