"""Gate by row and LayerNorm in one Triton kernel each way; imported where there is a GPU only.

Forward reads the latent and writes the result once. Backward saves neither product nor gates of tokens: it computes
them again, and sums the gates' gradients over the tokens of each row in fp32 and always in the same order. For that it
walks the tokens in the order of their rows, in blocks of equal length, so that a frequent token keeps nobody waiting: a
row within one block is finished there, the pieces of a row that crosses blocks are added by a second kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from egmla_megatron.attention.sum_by_row import RowMap, unpack_row_map

__all__ = ["KERNEL_GATES", "gate_norm"]

# T tokens, N columns, U rows, V = U + 1, P blocks of tokens

KERNEL_GATES = ("mul", "add")  # those that `_combine` and `_gradients` know
BLOCK_TOKENS = 32  # tokens of one program in backward
PIECES, PIECE_COLUMNS = 8, 256  # what a program of the second kernel reads at once


@triton.jit
def _combine(up, gate, GATE: tl.constexpr):
    if GATE == "mul":
        return up * gate
    else:
        return up + gate


@triton.jit
def _gradients(grad, up, gate, GATE: tl.constexpr):
    if GATE == "mul":
        return grad * gate, grad * up
    else:
        return grad, grad


@triton.jit
def _forward(
    up_ptr, gate_ptr, index_ptr, weight_ptr, bias_ptr, out_ptr, mean_ptr, rstd_ptr, columns, eps,
    GATE: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    row = tl.load(index_ptr + token)
    up = tl.load(up_ptr + token * columns + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * columns + column, mask=mask, other=0.0).to(tl.float32)
    out = _combine(up, gate, GATE)
    if NORM:
        mean = tl.sum(out, axis=0) / columns
        centred = tl.where(mask, out - mean, 0.0)
        rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / columns + eps)
        weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
        out = centred * rstd * weight + bias
        tl.store(mean_ptr + token, mean)
        tl.store(rstd_ptr + token, rstd)
    tl.store(out_ptr + token * columns + column, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _token_and_row(order_ptr, index_ptr, place, tokens):
    token = tl.load(order_ptr + place, mask=place < tokens, other=0)
    return token, tl.load(index_ptr + token)


@triton.jit
def _backward(
    grad_ptr, up_ptr, gate_ptr, index_ptr, order_ptr, starts_ptr, weight_ptr, mean_ptr, rstd_ptr,
    grad_up_ptr, grad_gate_ptr, piece_ptr, grad_weight_ptr, grad_bias_ptr, tokens, columns,
    GATE: tl.constexpr, NORM: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = tl.full([BLOCK], True, tl.int1) if FULL else column < columns
    row_total = tl.zeros([BLOCK], dtype=tl.float32)
    if NORM:
        weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
        grad_weight = tl.zeros([BLOCK], dtype=tl.float32)
        grad_bias = tl.zeros([BLOCK], dtype=tl.float32)
    # the next token is read while this one is computed, and the place of the one behind it: memory is far
    token, row = _token_and_row(order_ptr, index_ptr, block * TOKENS, tokens)
    next_token, next_row = _token_and_row(order_ptr, index_ptr, block * TOKENS + 1, tokens)
    grad_read = tl.load(grad_ptr + token * columns + column, mask=mask, other=0.0)
    up_read = tl.load(up_ptr + token * columns + column, mask=mask, other=0.0)
    gate_read = tl.load(gate_ptr + row * columns + column, mask=mask, other=0.0)
    for step in range(TOKENS):
        place = block * TOKENS + step
        there = place < tokens
        grad = tl.where(there, grad_read.to(tl.float32), 0.0)
        up, gate = up_read.to(tl.float32), gate_read.to(tl.float32)
        this_token, this_row = token, row
        token, row = next_token, next_row
        next_token, next_row = _token_and_row(order_ptr, index_ptr, place + 2, tokens)
        grad_read = tl.load(grad_ptr + token * columns + column, mask=mask, other=0.0)
        up_read = tl.load(up_ptr + token * columns + column, mask=mask, other=0.0)
        gate_read = tl.load(gate_ptr + row * columns + column, mask=mask, other=0.0)
        if NORM:
            mean, rstd = tl.load(mean_ptr + this_token), tl.load(rstd_ptr + this_token)
            normed = (_combine(up, gate, GATE) - mean) * rstd
            if not FULL:
                normed = tl.where(mask, normed, 0.0)
            grad_weight += grad * normed
            grad_bias += grad
            grad = grad * weight
            total, along = tl.reduce((grad, grad * normed), 0, _add_both)
            grad = (grad - total / columns - normed * (along / columns)) * rstd
        grad_up, grad_gate = _gradients(grad, up, gate, GATE)
        tl.store(
            grad_up_ptr + this_token * columns + column, grad_up.to(grad_up_ptr.dtype.element_ty), mask=mask & there
        )
        row_total += grad_gate
        begin, end = tl.load(starts_ptr + this_row), tl.load(starts_ptr + this_row + 1)
        ends_row = place + 1 == end
        if there & (ends_row | (step + 1 == TOKENS)):
            if ends_row & (begin >= block * TOKENS):
                gate_gradient = row_total.to(grad_gate_ptr.dtype.element_ty)
                tl.store(grad_gate_ptr + this_row * columns + column, gate_gradient, mask=mask)
            else:
                # piece 0 of a block is of the row that began before it, piece 1 of the one that goes on after it
                piece = block * 2 + (begin >= block * TOKENS).to(tl.int64)
                tl.store(piece_ptr + piece * columns + column, row_total, mask=mask)
            row_total = tl.zeros([BLOCK], dtype=tl.float32)
    if NORM:
        tl.store(grad_weight_ptr + block * columns + column, grad_weight, mask=mask)
        tl.store(grad_bias_ptr + block * columns + column, grad_bias, mask=mask)


@triton.jit
def _join_pieces(
    starts_ptr, piece_ptr, grad_gate_ptr, columns,
    TOKENS: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    begin, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    first = begin // TOKENS
    last = (end - 1) // TOKENS
    if (end == begin) | (first != last):
        total = tl.zeros([BLOCK], dtype=tl.float32)
        if end > begin:
            total += tl.load(piece_ptr + (first * 2 + 1) * columns + column, mask=mask, other=0.0)
            block = first + 1
            while block <= last:
                several = block + tl.arange(0, AT_ONCE)
                inside = (several <= last)[:, None] & mask[None, :]
                found = tl.load(piece_ptr + several[:, None] * 2 * columns + column[None, :], mask=inside, other=0.0)
                total += tl.sum(found, axis=0)
                block += AT_ONCE
        tl.store(grad_gate_ptr + row * columns + column, total.to(grad_gate_ptr.dtype.element_ty), mask=mask)


def _warps(columns: int, of_one: int) -> int:
    """Warps of a program, `of_one` columns each: measured best at 1536 and 4096 columns."""
    return min(max(triton.next_power_of_2(columns) // of_one, 1), 16)


class _GateNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, up_TN: Tensor, gate_UN: Tensor, row_map: Tensor, weight: Any, bias: Any, eps: float, gate: str
    ) -> Tensor:
        up_TN, gate_UN = up_TN.contiguous(), gate_UN.contiguous()
        tokens, columns = up_TN.shape
        out_TN = torch.empty_like(up_TN)
        mean_T, rstd_T = up_TN.new_empty(2, tokens, dtype=torch.float32)
        _forward[(tokens,)](
            up_TN, gate_UN, row_map, weight, bias, out_TN, mean_T, rstd_T, columns, eps,
            GATE=gate, NORM=weight is not None, BLOCK=triton.next_power_of_2(columns), num_warps=_warps(columns, 1024),
        )  # fmt: skip
        ctx.save_for_backward(up_TN, gate_UN, row_map, weight, mean_T, rstd_T)
        ctx.gate = gate
        return out_TN

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Any, ...]:
        up_TN, gate_UN, row_map, weight, mean_T, rstd_T = ctx.saved_tensors
        tokens, columns = up_TN.shape
        rows = unpack_row_map(row_map, tokens)
        blocks, width = triton.cdiv(tokens, BLOCK_TOKENS), triton.next_power_of_2(columns)
        grad_up_TN, grad_gate_UN = torch.empty_like(up_TN), torch.empty_like(gate_UN)
        pieces_P2N = up_TN.new_empty(blocks, 2, columns, dtype=torch.float32)
        partial_2PN = None if weight is None else up_TN.new_empty(2, blocks, columns, dtype=torch.float32)
        _backward[(blocks,)](
            grad_TN.contiguous(), up_TN, gate_UN, *rows, weight, mean_T, rstd_T,
            grad_up_TN, grad_gate_UN, pieces_P2N, *(partial_2PN if partial_2PN is not None else (None, None)),
            tokens, columns, GATE=ctx.gate, NORM=weight is not None, TOKENS=BLOCK_TOKENS, BLOCK=width,
            FULL=width == columns, num_warps=_warps(columns, 512),
        )  # fmt: skip
        _sum_crossing_rows(rows, pieces_P2N, grad_gate_UN)
        grad_weight, grad_bias = (None, None) if partial_2PN is None else partial_2PN.sum(1).to(weight.dtype)
        return grad_up_TN, grad_gate_UN, None, grad_weight, grad_bias, None, None


def _sum_crossing_rows(rows: RowMap, pieces_P2N: Tensor, grad_gate_UN: Tensor) -> None:
    """Rows of several blocks, and zeros for rows of no token."""
    count, columns = grad_gate_UN.shape
    _join_pieces[(count, triton.cdiv(columns, PIECE_COLUMNS))](
        rows.starts_V, pieces_P2N, grad_gate_UN, columns,
        TOKENS=BLOCK_TOKENS, AT_ONCE=PIECES, BLOCK=PIECE_COLUMNS,
    )  # fmt: skip


def gate_norm(
    up_TN: Tensor, gate_UN: Tensor, row_map: Tensor, weight_N: Tensor | None, bias_N: Tensor | None, eps: float,
    gate: str,
) -> Tensor:  # fmt: skip
    """LayerNorm(combine(up[t], gate[row of t])) over all N columns, as the paper's equations 3 to 5.

    Args:
        up_TN: up-projected latents; gate_UN: gates of the rows; row_map: `pack_row_map` of the T tokens.
        weight_N, bias_N: of the LayerNorm; None: there is none.
        gate: one of `KERNEL_GATES`.
    """
    if gate not in KERNEL_GATES:
        raise ValueError(
            f"gate: got {gate!r}, allowed {', '.join(KERNEL_GATES)}; teach _combine and _gradients the new one"
        )
    return _GateNorm.apply(up_TN, gate_UN, row_map, weight_N, bias_N, eps, gate)
