"""Gate by row and LayerNorm in one Triton kernel each way; imported where there is a GPU only.

Forward reads the latent and writes the result once. Backward saves neither product nor gates of tokens: it computes
them again, and sums the gates' gradients over the tokens of each row in fp32 and always in the same order. For that it
walks the tokens in the order of their rows, in blocks of equal length, so that a frequent token keeps nobody waiting: a
row within one block is finished there, the pieces of a row that crosses blocks are added by a second kernel.

What they write, and in backward read, is either one tensor [T,N] or, per head, keys without position and values in the
tensors that attention has (`KeysAndValues`): the latter saves a pass over the data each way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from egmla_megatron.attention.sum_by_row import RowMap, unpack_row_map

__all__ = ["KERNEL_GATES", "GateGradients", "KeysAndValues", "Saved", "gate_backward", "gate_forward"]

# T = S * B tokens in sequence-first order, N columns, U rows, V = U + 1, P blocks of tokens, H heads, K width of a key
# with its position, D of a value

KERNEL_GATES = ("mul", "add")  # those that `_combine` and `_gradients` know
BLOCK_TOKENS = 32  # tokens of one program in backward
PIECES, PIECE_COLUMNS = 8, 1024  # what a program of the second kernel reads at once


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
def _places(
    token, column, key_ptr, value_ptr, columns, batch, key_s, key_b, key_n, value_s, value_b, value_n,
    NOPE: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Where a column lies: in its head's key, then its value; with NOPE = 0 in a row of one tensor, `key_ptr`."""
    if NOPE == 0:
        return key_ptr + token * columns + column
    else:
        position, sample = token // batch, token % batch
        head, within = column // (NOPE + V), column % (NOPE + V)
        key_at = key_ptr + position * key_s + sample * key_b + (head * key_n + within)
        value_at = value_ptr + position * value_s + sample * value_b + (head * value_n + within - NOPE)
        return tl.where(within < NOPE, key_at, value_at)


@triton.jit
def _forward(
    up_ptr, gate_ptr, index_ptr, weight_ptr, bias_ptr, key_ptr, value_ptr, mean_ptr, rstd_ptr, columns, eps,
    batch, key_s, key_b, key_n, value_s, value_b, value_n,
    GATE: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr, NOPE: tl.constexpr, V: tl.constexpr,
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
    at = _places(
        token, column, key_ptr, value_ptr, columns, batch, key_s, key_b, key_n, value_s, value_b, value_n, NOPE, V
    )
    tl.store(at, out.to(key_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _token_and_row(order_ptr, index_ptr, place, tokens):
    token = tl.load(order_ptr + place, mask=place < tokens, other=0)
    return token, tl.load(index_ptr + token)


@triton.jit
def _backward(
    key_ptr, value_ptr, up_ptr, gate_ptr, index_ptr, order_ptr, starts_ptr, weight_ptr, mean_ptr, rstd_ptr,
    grad_up_ptr, grad_gate_ptr, piece_ptr, grad_weight_ptr, grad_bias_ptr, tokens, columns,
    batch, key_s, key_b, key_n, value_s, value_b, value_n,
    GATE: tl.constexpr, NORM: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
    NOPE: tl.constexpr, V: tl.constexpr,
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
    at = _places(
        token, column, key_ptr, value_ptr, columns, batch, key_s, key_b, key_n, value_s, value_b, value_n, NOPE, V
    )
    grad_read = tl.load(at, mask=mask, other=0.0)
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
        at = _places(
            token, column, key_ptr, value_ptr, columns, batch, key_s, key_b, key_n, value_s, value_b, value_n, NOPE, V
        )
        grad_read = tl.load(at, mask=mask, other=0.0)
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


class KeysAndValues(NamedTuple):
    """Keys [S,B,H,K], whose first columns are meant, and values [S,B,H,D], or gradients of both; rows contiguous."""

    key_SBHK: Tensor
    value_SBHD: Tensor
    nope: int  # columns of a key without position


class Saved(NamedTuple):
    """What the forward pass hands to the backward pass."""

    up_TN: Tensor
    gate_UN: Tensor
    row_map: Tensor
    weight_N: Tensor | None
    mean_T: Tensor
    rstd_T: Tensor


class GateGradients(NamedTuple):
    """Of latents, gates of the rows, weight and bias of the norm (None: there is none)."""

    up_TN: Tensor
    gate_UN: Tensor
    weight_N: Tensor | None
    bias_N: Tensor | None


def _layout(where: Tensor | KeysAndValues) -> tuple[tuple[Any, ...], tuple[int, ...], dict[str, int]]:
    """(pointers, batch and strides, widths) for the kernels."""
    if isinstance(where, Tensor):
        return (where, where), (1,) * 7, {"NOPE": 0, "V": 0}
    key, value, nope = where
    if nope < 1:
        raise ValueError(f"KeysAndValues.nope: got {nope}, allowed 1 and more columns without position")
    strides = (*key.stride()[:3], *value.stride()[:3])
    return (key, value), (key.shape[1], *strides), {"NOPE": nope, "V": value.shape[3]}


def gate_forward(
    up_TN: Tensor, gate_UN: Tensor, row_map: Tensor, weight_N: Tensor | None, bias_N: Tensor | None, eps: float,
    gate: str, into: Tensor | KeysAndValues,
) -> Saved:  # fmt: skip
    """Gate and LayerNorm, as `gate_heads_cuda.gate_norm`, written to `into`."""
    if gate not in KERNEL_GATES:
        raise ValueError(
            f"gate: got {gate!r}, allowed {', '.join(KERNEL_GATES)}; teach _combine and _gradients the new one"
        )
    up_TN, gate_UN = up_TN.contiguous(), gate_UN.contiguous()
    tokens, columns = up_TN.shape
    mean_T, rstd_T = up_TN.new_empty(2, tokens, dtype=torch.float32)
    pointers, strides, widths = _layout(into)
    _forward[(tokens,)](
        up_TN, gate_UN, row_map, weight_N, bias_N, *pointers, mean_T, rstd_T, columns, eps, *strides,
        GATE=gate, NORM=weight_N is not None, BLOCK=triton.next_power_of_2(columns), **widths,
        num_warps=_warps(columns, 1024),
    )  # fmt: skip
    return Saved(up_TN, gate_UN, row_map, weight_N, mean_T, rstd_T)


def gate_backward(saved: Saved, gate: str, gradients: Tensor | KeysAndValues) -> GateGradients:
    """Of what `gate_forward` read, by the gradients of what it wrote."""
    up_TN, gate_UN, row_map, weight, mean_T, rstd_T = saved
    tokens, columns = up_TN.shape
    rows = unpack_row_map(row_map, tokens)
    blocks, width = triton.cdiv(tokens, BLOCK_TOKENS), triton.next_power_of_2(columns)
    grad_up_TN, grad_gate_UN = torch.empty_like(up_TN), torch.empty_like(gate_UN)
    pieces_P2N = up_TN.new_empty(blocks, 2, columns, dtype=torch.float32)
    partial_2PN = None if weight is None else up_TN.new_empty(2, blocks, columns, dtype=torch.float32)
    pointers, strides, widths = _layout(gradients)
    _backward[(blocks,)](
        *pointers, up_TN, gate_UN, *rows, weight, mean_T, rstd_T,
        grad_up_TN, grad_gate_UN, pieces_P2N, *(partial_2PN if partial_2PN is not None else (None, None)),
        tokens, columns, *strides, GATE=gate, NORM=weight is not None, TOKENS=BLOCK_TOKENS, BLOCK=width,
        FULL=width == columns, **widths, num_warps=_warps(columns, 512),
    )  # fmt: skip
    _sum_crossing_rows(rows, pieces_P2N, grad_gate_UN)
    if weight is None or partial_2PN is None:
        return GateGradients(grad_up_TN, grad_gate_UN, None, None)
    return GateGradients(grad_up_TN, grad_gate_UN, *partial_2PN.sum(1).to(weight.dtype))


def _sum_crossing_rows(rows: RowMap, pieces_P2N: Tensor, grad_gate_UN: Tensor) -> None:
    """Rows of several blocks, and zeros for rows of no token."""
    count, columns = grad_gate_UN.shape
    _join_pieces[(count, triton.cdiv(columns, PIECE_COLUMNS))](
        rows.starts_V, pieces_P2N, grad_gate_UN, columns,
        TOKENS=BLOCK_TOKENS, AT_ONCE=PIECES, BLOCK=PIECE_COLUMNS,
    )  # fmt: skip
