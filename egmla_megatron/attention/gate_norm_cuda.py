"""Gate by row and LayerNorm in one Triton kernel each way; imported where there is a GPU only.

Forward reads the latent and writes the result once. Backward saves neither product nor gates of tokens: it computes
them again, and sums the gates' gradients over the tokens of each row in fp32 and always in the same order. For that it
walks the tokens in the order of their rows, in blocks of equal length, so that a frequent token keeps nobody waiting: a
row within one block is finished there, the pieces of a row that crosses blocks are added afterwards (`gate_sums_cuda`).

What they write, and in backward read, is either one tensor [T,N] or, per head, keys without position and values in the
tensors that attention has (`KeysAndValues`): the latter saves a pass over the data each way.

Where the heads are on several ranks, their common statistics come first (`gate_statistics_cuda`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.distributed import ProcessGroup

from egmla_megatron.attention.gate_parts_cuda import (
    KeysAndValues,
    combine,
    derivatives,
    latent_and_gate,
    layout,
    places,
    refuse_unknown,
    warps,
)
from egmla_megatron.attention.gate_statistics_cuda import shared_statistics, shared_sums
from egmla_megatron.attention.gate_sums_cuda import finish_sums
from egmla_megatron.attention.sum_by_row import unpack_row_map

__all__ = ["GateGradients", "Saved", "gate_backward", "gate_forward"]

# T = S * B tokens in sequence-first order, N columns, U rows, V = U + 1, P blocks of tokens, H heads, K width of a key
# with its position, D of a value

BLOCK_TOKENS = 32  # tokens of one program in backward


@triton.jit
def _forward(
    up_ptr, gate_ptr, index_ptr, weight_ptr, bias_ptr, key_ptr, value_ptr, mean_ptr, rstd_ptr, columns, eps,
    batch, key_s, key_b, key_n, value_s, value_b, value_n,
    GATE: tl.constexpr, NORM: tl.constexpr, GIVEN: tl.constexpr, BLOCK: tl.constexpr, NOPE: tl.constexpr,
    V: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < columns
    up, gate = latent_and_gate(up_ptr, gate_ptr, index_ptr, token, column, columns, mask)
    out = combine(up, gate, GATE)
    if NORM:
        if GIVEN:
            mean, rstd = tl.load(mean_ptr + token), tl.load(rstd_ptr + token)
            centred = out - mean
        else:
            mean = tl.sum(out, axis=0) / columns
            centred = tl.where(mask, out - mean, 0.0)
            rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / columns + eps)
            tl.store(mean_ptr + token, mean)
            tl.store(rstd_ptr + token, rstd)
        weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
        out = centred * rstd * weight + bias
    at = places(
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
def _read(
    token, row, column, mask, key_ptr, value_ptr, up_ptr, gate_ptr, columns,
    batch, key_s, key_b, key_n, value_s, value_b, value_n, NOPE: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    at = places(
        token, column, key_ptr, value_ptr, columns, batch, key_s, key_b, key_n, value_s, value_b, value_n, NOPE, V
    )
    grad = tl.load(at, mask=mask, other=0.0)
    up = tl.load(up_ptr + token * columns + column, mask=mask, other=0.0)
    return grad, up, tl.load(gate_ptr + row * columns + column, mask=mask, other=0.0)


@triton.jit
def _store_row(
    row_total, starts_ptr, grad_gate_ptr, piece_ptr, row, step, block, tokens, columns, column, mask,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Behind the last token of a row or of the block; returns the sum of what follows so far."""
    place = block * TOKENS + step
    begin, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    ends_row = place + 1 == end
    if (place < tokens) & (ends_row | (step + 1 == TOKENS)):
        if ends_row & (begin >= block * TOKENS):
            gate_gradient = row_total.to(grad_gate_ptr.dtype.element_ty)
            tl.store(grad_gate_ptr + row * columns + column, gate_gradient, mask=mask)
        else:
            # piece 0 of a block is of the row that began before it, piece 1 of the one that goes on after it
            piece = block * 2 + (begin >= block * TOKENS).to(tl.int64)
            tl.store(piece_ptr + piece * columns + column, row_total, mask=mask)
        row_total = tl.zeros_like(row_total)
    return row_total


@triton.jit
def _backward(
    key_ptr, value_ptr, up_ptr, gate_ptr, index_ptr, order_ptr, starts_ptr, weight_ptr, mean_ptr, rstd_ptr, sums_ptr,
    all_columns, grad_up_ptr, grad_gate_ptr, piece_ptr, grad_weight_ptr, grad_bias_ptr, tokens, columns,
    batch, key_s, key_b, key_n, value_s, value_b, value_n,
    GATE: tl.constexpr, NORM: tl.constexpr, GIVEN: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    FULL: tl.constexpr, NOPE: tl.constexpr, V: tl.constexpr,
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
    grad_read, up_read, gate_read = _read(
        token, row, column, mask, key_ptr, value_ptr, up_ptr, gate_ptr, columns,
        batch, key_s, key_b, key_n, value_s, value_b, value_n, NOPE, V,
    )  # fmt: skip
    for step in range(TOKENS):
        place = block * TOKENS + step
        there = place < tokens
        grad = tl.where(there, grad_read.to(tl.float32), 0.0)
        up, gate = up_read.to(tl.float32), gate_read.to(tl.float32)
        this_token, this_row = token, row
        token, row = next_token, next_row
        next_token, next_row = _token_and_row(order_ptr, index_ptr, place + 2, tokens)
        grad_read, up_read, gate_read = _read(
            token, row, column, mask, key_ptr, value_ptr, up_ptr, gate_ptr, columns,
            batch, key_s, key_b, key_n, value_s, value_b, value_n, NOPE, V,
        )  # fmt: skip
        if NORM:
            mean, rstd = tl.load(mean_ptr + this_token), tl.load(rstd_ptr + this_token)
            normed = (combine(up, gate, GATE) - mean) * rstd
            if not FULL:
                normed = tl.where(mask, normed, 0.0)
            grad_weight += grad * normed
            grad_bias += grad
            grad = grad * weight
            if GIVEN:
                total, along = tl.load(sums_ptr + this_token), tl.load(sums_ptr + tokens + this_token)
            else:
                total, along = tl.reduce((grad, grad * normed), 0, _add_both)
            grad = (grad - total / all_columns - normed * (along / all_columns)) * rstd
        grad_up, grad_gate = derivatives(grad, up, gate, GATE)
        up_at = grad_up_ptr + this_token * columns + column
        tl.store(up_at, grad_up.to(grad_up_ptr.dtype.element_ty), mask=mask & there)
        row_total = _store_row(
            row_total + grad_gate, starts_ptr, grad_gate_ptr, piece_ptr, this_row, step, block, tokens, columns,
            column, mask, TOKENS,
        )  # fmt: skip
    if NORM:
        tl.store(grad_weight_ptr + block * columns + column, grad_weight, mask=mask)
        tl.store(grad_bias_ptr + block * columns + column, grad_bias, mask=mask)


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


def gate_forward(
    up_TN: Tensor, gate_UN: Tensor, row_map: Tensor, weight_N: Tensor | None, bias_N: Tensor | None, eps: float,
    gate: str, into: Tensor | KeysAndValues, group: ProcessGroup | None = None,
) -> Saved:  # fmt: skip
    """Gate and LayerNorm, as `gate_heads_cuda.gate_norm`, written to `into`.

    group: ranks that share the columns, as many each; None: this rank has them all.
    """
    refuse_unknown(gate)
    up_TN, gate_UN = up_TN.contiguous(), gate_UN.contiguous()
    tokens, columns = up_TN.shape
    given = weight_N is not None and group is not None and group.size() > 1
    if given and group is not None:
        mean_T, rstd_T = shared_statistics(up_TN, gate_UN, row_map, eps, gate, group)
    else:
        mean_T, rstd_T = up_TN.new_empty(2, tokens, dtype=torch.float32)
    pointers, strides, widths = layout(into)
    _forward[(tokens,)](
        up_TN, gate_UN, row_map, weight_N, bias_N, *pointers, mean_T, rstd_T, columns, eps, *strides,
        GATE=gate, NORM=weight_N is not None, GIVEN=given, BLOCK=triton.next_power_of_2(columns), **widths,
        num_warps=warps(columns, 1024),
    )  # fmt: skip
    return Saved(up_TN, gate_UN, row_map, weight_N, mean_T, rstd_T)


def gate_backward(
    saved: Saved, gate: str, gradients: Tensor | KeysAndValues, group: ProcessGroup | None = None
) -> GateGradients:
    """Of what `gate_forward` read, by the gradients of what it wrote."""
    up_TN, gate_UN, row_map, weight, mean_T, rstd_T = saved
    tokens, columns = up_TN.shape
    rows = unpack_row_map(row_map, tokens)
    blocks, width = triton.cdiv(tokens, BLOCK_TOKENS), triton.next_power_of_2(columns)
    grad_up_TN, grad_gate_UN = torch.empty_like(up_TN), torch.empty_like(gate_UN)
    pieces_P2N = up_TN.new_empty(blocks, 2, columns, dtype=torch.float32)
    partial_2PN = None if weight is None else up_TN.new_empty(2, blocks, columns, dtype=torch.float32)
    pointers, strides, widths = layout(gradients)
    sums_2T, all_columns = None, columns
    if weight is not None and group is not None and group.size() > 1:
        sums_2T = shared_sums(gradients, up_TN, gate_UN, row_map, weight, mean_T, rstd_T, gate, group)
        all_columns *= group.size()
    _backward[(blocks,)](
        *pointers, up_TN, gate_UN, *rows, weight, mean_T, rstd_T, sums_2T, all_columns,
        grad_up_TN, grad_gate_UN, pieces_P2N, *(partial_2PN if partial_2PN is not None else (None, None)),
        tokens, columns, *strides, GATE=gate, NORM=weight is not None, GIVEN=sums_2T is not None,
        TOKENS=BLOCK_TOKENS, BLOCK=width, FULL=width == columns, **widths, num_warps=warps(columns, 512),
    )  # fmt: skip
    grad_norm_2N = None if weight is None else weight.new_empty(2, columns)
    finish_sums(rows, BLOCK_TOKENS, pieces_P2N, partial_2PN, grad_gate_UN, grad_norm_2N)
    return GateGradients(grad_up_TN, grad_gate_UN, *((None, None) if grad_norm_2N is None else grad_norm_2N))
