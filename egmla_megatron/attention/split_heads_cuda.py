"""Queries, keys and values for attention in one Triton kernel each way; imported where there is a GPU only.

Rotates the position parts, hands the shared RoPE key to every head and splits keys from values: a pass over the data
where single operations take ten.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from egmla_megatron.attention.head_sizes import HeadSizes

__all__ = ["heads_backward", "heads_forward", "split_heads", "with_contiguous_rows"]

# S sequence, B batch, N heads of this rank, K = nope + rope, R rope width


@triton.jit
def _cos_sin(angle_ptr, angle_stride, position, HALF: tl.constexpr, half_index):
    angle = tl.load(angle_ptr + position * angle_stride + half_index, mask=half_index < HALF, other=0.0)
    return tl.cos(angle), tl.sin(angle)


@triton.jit
def _forward(
    q_ptr, kv_ptr, rope_ptr, angle_ptr, query_ptr, key_ptr, value_ptr,
    rope_stride_s, rope_stride_b, angle_stride, batch,
    KV: tl.constexpr, HEADS: tl.constexpr, NOPE: tl.constexpr, HALF: tl.constexpr, V: tl.constexpr,
    HEADS_UP: tl.constexpr, NOPE_UP: tl.constexpr, HALF_UP: tl.constexpr, V_UP: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position = token // batch
    K: tl.constexpr = NOPE + 2 * HALF
    heads = tl.arange(0, HEADS_UP)[:, None]
    nope, half, v = tl.arange(0, NOPE_UP), tl.arange(0, HALF_UP), tl.arange(0, V_UP)
    cos, sin = _cos_sin(angle_ptr, angle_stride, position, HALF, half)
    from_q = q_ptr + token * HEADS * K
    to_query, to_key = query_ptr + token * HEADS * K, key_ptr + token * HEADS * K

    mask = (heads < HEADS) & (nope < NOPE)[None, :]
    at = heads * K + nope[None, :]
    tl.store(to_query + at, tl.load(from_q + at, mask=mask), mask=mask)
    if KV:
        from_kv = kv_ptr + token * HEADS * (NOPE + V)
        tl.store(to_key + at, tl.load(from_kv + heads * (NOPE + V) + nope[None, :], mask=mask), mask=mask)
        mask = (heads < HEADS) & (v < V)[None, :]
        found = tl.load(from_kv + heads * (NOPE + V) + NOPE + v[None, :], mask=mask)
        tl.store(value_ptr + token * HEADS * V + heads * V + v[None, :], found, mask=mask)

    rope, halves = tl.arange(0, 2 * HALF_UP), (heads < HEADS) & (half < HALF)[None, :]
    mask = (heads < HEADS) & (rope < 2 * HALF)[None, :]
    found = tl.load(from_q + heads * K + NOPE + rope[None, :], mask=mask, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(found, [HEADS_UP, HALF_UP, 2]))
    at = heads * K + NOPE + half[None, :]
    kind = query_ptr.dtype.element_ty
    tl.store(to_query + at, (even * cos[None, :] - odd * sin[None, :]).to(kind), mask=halves)
    tl.store(to_query + at + HALF, (odd * cos[None, :] + even * sin[None, :]).to(kind), mask=halves)

    from_rope = rope_ptr + position * rope_stride_s + (token % batch) * rope_stride_b
    found = tl.load(from_rope + rope, mask=rope < 2 * HALF, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(found, [HALF_UP, 2]))
    left, right = (even * cos - odd * sin).to(kind), (odd * cos + even * sin).to(kind)
    shape: tl.constexpr = [HEADS_UP, HALF_UP]
    tl.store(to_key + at, tl.broadcast_to(left[None, :], shape), mask=halves)
    tl.store(to_key + at + HALF, tl.broadcast_to(right[None, :], shape), mask=halves)


@triton.jit
def _backward(
    dquery_ptr, dkey_ptr, dvalue_ptr, angle_ptr, dq_ptr, dkv_ptr, drope_ptr,
    query_s, query_b, query_n, key_s, key_b, key_n, value_s, value_b, value_n, angle_stride, batch,
    KV: tl.constexpr, HEADS: tl.constexpr, NOPE: tl.constexpr, HALF: tl.constexpr, V: tl.constexpr,
    HEADS_UP: tl.constexpr, NOPE_UP: tl.constexpr, HALF_UP: tl.constexpr, V_UP: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position, sample = token // batch, token % batch
    K: tl.constexpr = NOPE + 2 * HALF
    heads = tl.arange(0, HEADS_UP)[:, None]
    nope, half, v = tl.arange(0, NOPE_UP), tl.arange(0, HALF_UP), tl.arange(0, V_UP)
    cos, sin = _cos_sin(angle_ptr, angle_stride, position, HALF, half)
    from_query = dquery_ptr + position * query_s + sample * query_b + heads * query_n
    from_key = dkey_ptr + position * key_s + sample * key_b + heads * key_n
    from_value = dvalue_ptr + position * value_s + sample * value_b + heads * value_n
    to_q = dq_ptr + token * HEADS * K

    mask = (heads < HEADS) & (nope < NOPE)[None, :]
    tl.store(to_q + heads * K + nope[None, :], tl.load(from_query + nope[None, :], mask=mask), mask=mask)
    if KV:
        to_kv = dkv_ptr + token * HEADS * (NOPE + V)
        tl.store(to_kv + heads * (NOPE + V) + nope[None, :], tl.load(from_key + nope[None, :], mask=mask), mask=mask)
        mask = (heads < HEADS) & (v < V)[None, :]
        found = tl.load(from_value + v[None, :], mask=mask)
        tl.store(to_kv + heads * (NOPE + V) + NOPE + v[None, :], found, mask=mask)

    rope, halves = tl.arange(0, 2 * HALF_UP), (heads < HEADS) & (half < HALF)[None, :]
    left = tl.load(from_query + NOPE + half[None, :], mask=halves, other=0.0).to(tl.float32)
    right = tl.load(from_query + NOPE + HALF + half[None, :], mask=halves, other=0.0).to(tl.float32)
    kind = dq_ptr.dtype.element_ty
    # pairs are put together before they are stored: every second element alone takes twice the time
    found = tl.interleave(left * cos[None, :] + right * sin[None, :], right * cos[None, :] - left * sin[None, :])
    mask = (heads < HEADS) & (rope < 2 * HALF)[None, :]
    tl.store(to_q + heads * K + NOPE + rope[None, :], found.to(kind), mask=mask)

    left = tl.sum(tl.load(from_key + NOPE + half[None, :], mask=halves, other=0.0).to(tl.float32), axis=0)
    right = tl.sum(tl.load(from_key + NOPE + HALF + half[None, :], mask=halves, other=0.0).to(tl.float32), axis=0)
    found = tl.interleave(left * cos + right * sin, right * cos - left * sin).to(kind)
    tl.store(drope_ptr + token * (2 * HALF) + rope, found, mask=rope < 2 * HALF)


def _sizes(heads: int, sizes: HeadSizes) -> dict[str, int]:
    exact = {"HEADS": heads, "NOPE": sizes.nope, "HALF": sizes.rope // 2, "V": sizes.v}
    return exact | {f"{name}_UP": triton.next_power_of_2(size) for name, size in exact.items()}


def heads_forward(
    q: Tensor, kv: Tensor | None, rope_SBR: Tensor, angles_SR: Tensor, heads: int, sizes: HeadSizes
) -> tuple[Tensor, Tensor, Tensor]:
    """As `split_heads`; without `kv` the values and what of the keys has no position are left as they lie in memory."""
    q = q.contiguous()
    kv = kv.contiguous() if kv is not None else None
    rope_SBR = rope_SBR if rope_SBR.stride(-1) == 1 else rope_SBR.contiguous()
    sequence, batch, _ = q.shape
    query, key = (q.new_empty(sequence, batch, heads, sizes.nope + sizes.rope) for _ in range(2))
    value = q.new_empty(sequence, batch, heads, sizes.v)
    _forward[(sequence * batch,)](
        q, kv, rope_SBR, angles_SR, query, key, value,
        rope_SBR.stride(0), rope_SBR.stride(1), angles_SR.stride(0), batch, KV=kv is not None, **_sizes(heads, sizes),
    )  # fmt: skip
    return query, key, value


def heads_backward(
    grads: tuple[Tensor, Tensor, Tensor], angles_SR: Tensor, sizes: HeadSizes, *, kv: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Gradients of q, kv (None unless asked for) and the RoPE key, by those of queries, keys and values, whose rows are
    contiguous."""
    sequence, batch, heads = grads[0].shape[:3]
    dq = grads[0].new_empty(sequence, batch, heads * (sizes.nope + sizes.rope))
    dkv = grads[0].new_empty(sequence, batch, heads * (sizes.nope + sizes.v)) if kv else None
    drope_SBR = grads[0].new_empty(sequence, batch, sizes.rope)
    strides = [stride for grad in grads for stride in grad.stride()[:3]]
    _backward[(sequence * batch,)](
        *grads, angles_SR, dq, dkv, drope_SBR, *strides, angles_SR.stride(0), batch, KV=kv, **_sizes(heads, sizes)
    )
    return dq, dkv, drope_SBR


def with_contiguous_rows(grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The same, copied where the last dimension has gaps."""
    return tuple(grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, rope_SBR: Tensor, angles_SR: Tensor, heads: int, sizes: HeadSizes
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(angles_SR)
        ctx.sizes = sizes
        return heads_forward(q, kv, rope_SBR, angles_SR, heads, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, key, value = with_contiguous_rows(grads)
        found = heads_backward((query, key, value), ctx.saved_tensors[0], ctx.sizes, kv=True)
        return *found, None, None, None


def split_heads(
    q: Tensor, kv: Tensor, rope_SBR: Tensor, angles_SR: Tensor, heads: int, sizes: HeadSizes
) -> tuple[Tensor, Tensor, Tensor]:
    """What attention reads, each [S,B,N,...] and contiguous.

    Args:
        q: [S,B,N*(nope+rope)], in every head without position first; kv: [S,B,N*(nope+v)].
        rope_SBR: the key part with position, one for all heads.
        angles_SR: radians of every position in fp32, of which the first R/2 of a row count. Neighbouring elements are a
            pair; rotated pairs come out as two halves, as megatron-core leaves them.

    Returns:
        query [S,B,N,K], key [S,B,N,K], value [S,B,N,v].
    """
    return _SplitHeads.apply(q, kv, rope_SBR, angles_SR, heads, sizes)
