"""What the kernels of the gate share: the gates themselves, and where columns of heads lie. Imported where there is a
GPU only."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "KERNEL_GATES",
    "KeysAndValues",
    "combine",
    "derivatives",
    "latent_and_gate",
    "layout",
    "places",
    "refuse_unknown",
    "warps",
]

# S sequence, B batch, H heads, K width of a key with its position, D of a value

KERNEL_GATES = ("mul", "add")  # those that `combine` and `derivatives` know


@triton.jit
def latent_and_gate(up_ptr, gate_ptr, index_ptr, token, column, columns, mask):
    """Of one token, in fp32, zeros where there is no column."""
    row = tl.load(index_ptr + token)
    up = tl.load(up_ptr + token * columns + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * columns + column, mask=mask, other=0.0).to(tl.float32)
    return up, gate


@triton.jit
def combine(up, gate, GATE: tl.constexpr):
    if GATE == "mul":
        return up * gate
    else:
        return up + gate


@triton.jit
def derivatives(grad, up, gate, GATE: tl.constexpr):
    if GATE == "mul":
        return grad * gate, grad * up
    else:
        return grad, grad


@triton.jit
def places(
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


class KeysAndValues(NamedTuple):
    """Keys [S,B,H,K], whose first columns are meant, and values [S,B,H,D], or derivatives of both; rows contiguous."""

    key_SBHK: Tensor
    value_SBHD: Tensor
    nope: int  # columns of a key without position


def layout(where: Tensor | KeysAndValues) -> tuple[tuple[Any, ...], tuple[int, ...], dict[str, int]]:
    """(pointers, batch and strides, widths) for the kernels."""
    if isinstance(where, Tensor):
        return (where, where), (1,) * 7, {"NOPE": 0, "V": 0}
    key, value, nope = where
    if nope < 1:
        raise ValueError(f"KeysAndValues.nope: got {nope}, allowed 1 and more columns without position")
    strides = (*key.stride()[:3], *value.stride()[:3])
    return (key, value), (key.shape[1], *strides), {"NOPE": nope, "V": value.shape[3]}


def refuse_unknown(gate: str) -> None:
    """Raises ValueError for a gate that the kernels do not know."""
    if gate not in KERNEL_GATES:
        raise ValueError(
            f"gate: got {gate!r}, allowed {', '.join(KERNEL_GATES)}; teach combine and derivatives the new one"
        )


def warps(columns: int, of_one: int) -> int:
    """Warps of a program, `of_one` columns each: measured best at 1536 and 4096 columns."""
    return min(max(triton.next_power_of_2(columns) // of_one, 1), 16)
