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

from egmla_megatron.train.adam_cuda import read, read_master, updated, write, write_master

__all__ = ["SWEEP", "RowTensors", "Rows", "advance_all", "catch_up", "row_squares", "update_rows"]

# V rows of N columns, R rows that are looked up, H = SWEEP updates that are remembered

# steps in which every row is updated at least once, and updates that are remembered: a row lacks at most one fewer
SWEEP = 128
STRIDE = 16  # rows that a program looks at
MOST = 1024  # columns of a program
LOOK_UPS = 256  # look-ups, and rows, of a program that only takes notes


@triton.jit
def _advance(
    history_ptr, weight_ptr, mean_ptr, square_ptr, master_ptr, grad_ptr, plan_ptr, place, mask, first, last, was_read,
    lr, beta1, beta2, eps, decay,
    PLANNED: tl.constexpr, SWEEP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    # updates first to last without gradient; with PLANNED one more, with the gradient of a row that was read
    mean, square = read(mean_ptr + place, mask, MASKED), read(square_ptr + place, mask, MASKED)
    master = read_master(weight_ptr + place, master_ptr + place, mask, MASKED)
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
    write_master(weight_ptr + place, master_ptr + place, master, mask, MASKED)


@triton.jit
def _valid(row, rows):
    return tl.minimum(tl.maximum(row, 0), rows - 1)  # the look-up itself refuses others


@triton.jit
def _claim(ids_ptr, count_ptr, done_ptr, read_ptr, from_ptr, looked_up, rows, BLOCK: tl.constexpr):
    # a row that was not read since the last update goes to one of the look-ups that name it
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < looked_up
    row = _valid(tl.load(ids_ptr + place, mask=mask, other=0).to(tl.int64), rows)
    count = tl.load(count_ptr)
    mine = mask & (tl.atomic_xchg(read_ptr + row, 1, mask=mask) == 0)
    done = tl.load(done_ptr + row, mask=mine, other=0)
    tl.store(from_ptr + place, tl.where(mine, tl.minimum(done, count), count), mask=mask)
    tl.store(done_ptr + row, tl.maximum(done, count), mask=mine)


@triton.jit
def _catch_up(
    ids_ptr, from_ptr, count_ptr, history_ptr, weight_ptr, mean_ptr, square_ptr, master_ptr, rows, beta1, beta2, eps,
    COLUMNS: tl.constexpr, SWEEP: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
    ACROSS: tl.constexpr,
):  # fmt: skip
    # updates `from` + 1 to `count`, of row ids[i] from from[i]; without ids of row i
    index = (tl.program_id(0) // ACROSS).to(tl.int64)
    count, done = tl.load(count_ptr), tl.load(from_ptr + index)
    if done < count:
        row = index if ids_ptr is None else _valid(tl.load(ids_ptr + index).to(tl.int64), rows)
        place = (tl.program_id(0) % ACROSS) * BLOCK + tl.arange(0, BLOCK)
        _advance(
            history_ptr, weight_ptr, mean_ptr, square_ptr, master_ptr, weight_ptr, history_ptr,
            row * COLUMNS + place, place < COLUMNS, done + 1, count, False,
            0.0, beta1, beta2, eps, 0.0, PLANNED=False, SWEEP=SWEEP, MASKED=MASKED,
        )  # fmt: skip


@triton.jit
def _rows_of(program, programs, STRIDE: tl.constexpr):
    return program + tl.arange(0, STRIDE) * programs  # far apart: the ids of common tokens are neighbours


@triton.jit
def _bits(chosen, STRIDE: tl.constexpr):
    return tl.sum(chosen.to(tl.int32) << tl.arange(0, STRIDE), axis=0)


@triton.jit
def _update_row(
    row, column, was_read, plan_ptr, count_ptr, done_ptr, history_ptr, grad_ptr, weight_ptr, mean_ptr, square_ptr,
    master_ptr, lr, beta1, beta2, eps, decay,
    COLUMNS: tl.constexpr, SWEEP: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place, mask = row * COLUMNS + column, column < COLUMNS
    count, done = tl.load(count_ptr), tl.load(done_ptr + row)
    if tl.load(plan_ptr + 3) > 0.0:
        _advance(
            history_ptr, weight_ptr, mean_ptr, square_ptr, master_ptr, grad_ptr, plan_ptr, place, mask,
            done + 1, count - 1, was_read, lr, beta1, beta2, eps, decay,
            PLANNED=True, SWEEP=SWEEP, MASKED=MASKED,
        )  # fmt: skip
    elif done < count:
        _advance(
            history_ptr, weight_ptr, mean_ptr, square_ptr, master_ptr, grad_ptr, plan_ptr, place, mask,
            done + 1, count, False, 0.0, beta1, beta2, eps, 0.0,
            PLANNED=False, SWEEP=SWEEP, MASKED=MASKED,
        )  # fmt: skip
    if was_read:
        tl.debug_barrier()  # all threads have read the gradient
        write(grad_ptr + place, tl.zeros((BLOCK,), grad_ptr.dtype.element_ty), mask, MASKED)


@triton.jit(do_not_specialize=["phase"])
def _update_rows(
    plan_ptr, count_ptr, done_ptr, read_ptr, history_ptr, grad_ptr, weight_ptr, mean_ptr, square_ptr, master_ptr,
    rows, phase, lr, beta1, beta2, eps, decay,
    COLUMNS: tl.constexpr, SWEEP: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
    STRIDE: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    first, step = tl.program_id(0) // ACROSS, tl.num_programs(0) // ACROSS
    column = (tl.program_id(0) % ACROSS) * BLOCK + tl.arange(0, BLOCK)
    row = _rows_of(first, step, STRIDE)
    was_read = tl.load(read_ptr + row, mask=row < rows, other=0) != 0
    read = _bits(was_read, STRIDE)
    chosen = read | _bits((row % SWEEP == phase) & (row < rows), STRIDE)
    for index in range(STRIDE):
        if (chosen >> index) & 1 != 0:
            _update_row(
                (first + index * step).to(tl.int64), column, (read >> index) & 1 != 0, plan_ptr, count_ptr, done_ptr,
                history_ptr, grad_ptr, weight_ptr, mean_ptr, square_ptr, master_ptr, lr, beta1, beta2, eps, decay,
                COLUMNS=COLUMNS, SWEEP=SWEEP, MASKED=MASKED, BLOCK=BLOCK,
            )  # fmt: skip


@triton.jit(do_not_specialize=["phase"])
def _note_update(
    plan_ptr, count_ptr, done_ptr, read_ptr, history_ptr, rows, phase, lr, decay,
    SWEEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    planned, count = tl.load(plan_ptr + 3) > 0.0, tl.load(count_ptr)
    if (tl.program_id(0) == 0) & planned:
        slot = history_ptr + (count % SWEEP) * 3
        tl.store(slot, lr / tl.load(plan_ptr + 1))
        tl.store(slot + 1, 1.0 / tl.load(plan_ptr + 2))
        tl.store(slot + 2, lr * decay)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < rows
    chosen = there & ((tl.load(read_ptr + row, mask=there, other=0) != 0) | (row % SWEEP == phase))
    done = tl.load(done_ptr + row, mask=chosen, other=0)
    tl.store(done_ptr + row, tl.where(planned, count, tl.maximum(done, count)), mask=chosen)
    tl.store(read_ptr + row, 0, mask=chosen)


@triton.jit
def _row_squares(
    read_ptr, grad_ptr, sums_ptr, rows,
    COLUMNS: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr, STRIDE: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    first, step = tl.program_id(0) // ACROSS, tl.num_programs(0) // ACROSS
    column = (tl.program_id(0) % ACROSS) * BLOCK + tl.arange(0, BLOCK)
    row = _rows_of(first, step, STRIDE)
    chosen = _bits(tl.load(read_ptr + row, mask=row < rows, other=0) != 0, STRIDE)
    total = tl.zeros((BLOCK,), tl.float32)
    for index in range(STRIDE):
        if (chosen >> index) & 1 != 0:
            at = grad_ptr + (first + index * step).to(tl.int64) * COLUMNS + column
            grad = read(at, column < COLUMNS, MASKED).to(tl.float32)
            total += grad * grad
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total))


RowTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # as `AdamTensors`, all [V, N]


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
    # ACROSS programs for a row, side by side; one dimension, of which there can be more than of a grid's others
    block = min(MOST, triton.next_power_of_2(columns))
    return {
        "COLUMNS": columns, "BLOCK": block, "MASKED": columns % block != 0, "ACROSS": triton.cdiv(columns, block)
    }  # fmt: skip


def catch_up(
    rows: Rows, tensors: RowTensors, ids_R: Tensor, count_1: Tensor, *, betas: tuple[float, float], eps: float
) -> None:
    """Make the updates that the rows `ids_R`, about to be looked up, lack, and mark them as read; ids may repeat.

    Args:
        count_1: updates so far, int64.
    """
    from_R = torch.empty(len(ids_R), dtype=torch.int64, device=ids_R.device)
    _claim[(triton.cdiv(len(ids_R), LOOK_UPS),)](
        ids_R, count_1, rows.done_V, rows.read_V, from_R, len(ids_R), len(rows.done_V), BLOCK=LOOK_UPS
    )
    _advance_rows(rows, tensors, ids_R, from_R, count_1, betas, eps)


def _advance_rows(
    rows: Rows, tensors: RowTensors, ids_R: Tensor | None, from_R: Tensor, count_1: Tensor,
    betas: tuple[float, float], eps: float,
) -> None:  # fmt: skip
    _, weight, *states = tensors
    constants = _columns(weight.shape[1])
    _catch_up[(constants["ACROSS"] * len(from_R),)](
        ids_R, from_R, count_1, rows.history_H3, weight, *states, len(weight), *map(float, betas), float(eps),
        SWEEP=rows.sweep, **constants,
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
    size, columns = tensors[1].shape
    constants = _columns(columns)
    _update_rows[(constants["ACROSS"] * triton.cdiv(size, STRIDE),)](
        plan_4, count_1, rows.done_V, rows.read_V, rows.history_H3, *tensors,
        size, phase, float(lr), *map(float, betas), float(eps), float(weight_decay),
        SWEEP=rows.sweep, STRIDE=STRIDE, **constants,
    )  # fmt: skip
    _note_update[(triton.cdiv(size, LOOK_UPS),)](
        plan_4, count_1, rows.done_V, rows.read_V, rows.history_H3, size, phase, float(lr), float(weight_decay),
        SWEEP=rows.sweep, BLOCK=LOOK_UPS,
    )  # fmt: skip


def advance_all(rows: Rows, tensors: RowTensors, count_1: Tensor, *, betas: tuple[float, float], eps: float) -> None:
    """Make the updates that rows of the table lack."""
    _advance_rows(rows, tensors, None, rows.done_V, count_1, betas, eps)
    rows.done_V.clamp_(min=count_1)


def row_squares(rows: Rows, grad_VN: Tensor) -> Tensor:
    """Sum of squares of the gradient [1], fp32: of the rows that were read, the others have none."""
    size, columns = grad_VN.shape
    constants = _columns(columns)
    sums = torch.empty(constants["ACROSS"] * triton.cdiv(size, STRIDE), dtype=torch.float32, device=grad_VN.device)
    _row_squares[(len(sums),)](rows.read_V, grad_VN, sums, size, STRIDE=STRIDE, **constants)
    return sums.sum().reshape(1)
