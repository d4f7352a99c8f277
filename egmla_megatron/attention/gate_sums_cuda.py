"""What is left to add behind the gate's backward kernel, in one Triton kernel; imported where there is a GPU only.

The backward kernel finishes the rows that lie within one of its blocks of tokens. Here the pieces of rows that cross
blocks are added, rows of no token get zeros, and the blocks' parts of the norm's gradients are added: alone, each of
the three is a launch that moves little.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from egmla_megatron.attention.sum_by_row import RowMap

__all__ = ["finish_sums"]

# T tokens, N columns, U rows, P blocks of tokens

PIECES, COLUMNS = 8, 1024  # pieces and columns that a program reads at once
ROWS = 16  # that a program looks at for zeros
PARTS, NORM_COLUMNS = 64, 32  # parts and columns of the norm's gradients that a program reads at once


@triton.jit
def _add_norm(part_ptr, grad_norm_ptr, program, columns, blocks, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    programs = tl.cdiv(columns, BLOCK)
    which = (program // programs).to(tl.int64)  # weight, bias
    column = (program % programs) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    total = tl.zeros([PARTS, BLOCK], dtype=tl.float32)
    start = 0
    while start < blocks:  # Triton's interpreter has no range over an argument
        block = start + tl.arange(0, PARTS)
        inside = (block < blocks)[:, None] & mask[None, :]
        at = part_ptr + (which * blocks + block[:, None]) * columns + column[None, :]
        total += tl.load(at, mask=inside, other=0.0)
        start += PARTS
    out = tl.sum(total, axis=0)
    tl.store(grad_norm_ptr + which * columns + column, out.to(grad_norm_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _join_pieces(
    index_ptr, order_ptr, starts_ptr, piece_ptr, grad_gate_ptr, program, tokens, columns,
    TOKENS: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # of the row that begins in a block and goes on after it
    programs = tl.cdiv(columns, BLOCK)
    first = (program // programs).to(tl.int64)
    column = (program % programs) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    behind = tl.minimum((first + 1) * TOKENS, tokens)
    row = tl.load(index_ptr + tl.load(order_ptr + behind - 1))
    begin, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    if (begin >= first * TOKENS) & (end > behind):
        last = (end - 1) // TOKENS
        total = tl.load(piece_ptr + (first * 2 + 1) * columns + column, mask=mask, other=0.0)
        block = first + 1
        while block <= last:
            several = block + tl.arange(0, AT_ONCE)
            inside = (several <= last)[:, None] & mask[None, :]
            found = tl.load(piece_ptr + several[:, None] * 2 * columns + column[None, :], mask=inside, other=0.0)
            total += tl.sum(found, axis=0)
            block += AT_ONCE
        tl.store(grad_gate_ptr + row * columns + column, total.to(grad_gate_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _zero_rows(starts_ptr, grad_gate_ptr, program, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    programs = tl.cdiv(columns, BLOCK)
    row = (program // programs).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (program % programs) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.load(starts_ptr + row, mask=row < rows, other=0)
    end = tl.load(starts_ptr + row + 1, mask=row < rows, other=1)
    empty = begin == end
    if tl.max(empty.to(tl.int32), axis=0) > 0:
        mask = empty[:, None] & (column < columns)[None, :]
        zeros = tl.zeros([ROWS, BLOCK], dtype=grad_gate_ptr.dtype.element_ty)
        tl.store(grad_gate_ptr + row[:, None] * columns + column[None, :], zeros, mask=mask)


@triton.jit
def _finish(
    index_ptr, order_ptr, starts_ptr, piece_ptr, grad_gate_ptr, part_ptr, grad_norm_ptr,
    tokens, columns, blocks, rows, norm_programs, piece_programs,
    TOKENS: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    NORM_BLOCK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0) - norm_programs
    if program >= piece_programs:
        _zero_rows(starts_ptr, grad_gate_ptr, program - piece_programs, rows, columns, ROWS, BLOCK)
    elif program >= 0:
        _join_pieces(
            index_ptr, order_ptr, starts_ptr, piece_ptr, grad_gate_ptr, program, tokens, columns, TOKENS, AT_ONCE, BLOCK
        )
    elif NORM:
        _add_norm(part_ptr, grad_norm_ptr, program + norm_programs, columns, blocks, PARTS, NORM_BLOCK)


def finish_sums(
    rows: RowMap,
    block_tokens: int,
    pieces_P2N: Tensor,
    partial_2PN: Tensor | None,
    grad_gate_UN: Tensor,
    grad_norm_2N: Tensor | None,
) -> None:
    """Fill what the backward kernel has left of `grad_gate_UN`, and `grad_norm_2N`.

    Args:
        block_tokens: of a block.
        pieces_P2N: sums of the row that a block did not begin and of the one that it did not end, fp32.
        partial_2PN: the blocks' parts of the gradients of the norm's weight and bias, fp32; None: there is no norm.
    """
    (count, columns), blocks = grad_gate_UN.shape, len(pieces_P2N)
    across = triton.cdiv(columns, COLUMNS)
    norm_programs = 0 if partial_2PN is None else 2 * triton.cdiv(columns, NORM_COLUMNS)
    piece_programs = blocks * across
    _finish[(norm_programs + piece_programs + triton.cdiv(count, ROWS) * across,)](
        *rows, pieces_P2N, grad_gate_UN, partial_2PN, grad_norm_2N,
        len(rows.index_T), columns, blocks, count, norm_programs, piece_programs,
        TOKENS=block_tokens, AT_ONCE=PIECES, BLOCK=COLUMNS, ROWS=ROWS, PARTS=PARTS, NORM_BLOCK=NORM_COLUMNS,
        NORM=partial_2PN is not None,
    )  # fmt: skip
