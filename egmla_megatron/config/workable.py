"""How the checks refuse a value, and how they find the nearest one that works."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

from egmla_megatron.config.values import as_text
from egmla_megatron.errors import UserError

__all__ = ["divisors", "nearest", "nearest_divisor", "nearest_multiple", "refuse"]


def refuse(what: str, got: Any, allowed: str, fix: str) -> NoReturn:
    """Raises UserError with the four parts of every message."""
    raise UserError(f"{what}: got {as_text(got)}; allowed: {allowed}; fix: {fix}")


def divisors(n: int) -> list[int]:
    """Returns the divisors of n >= 1, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def nearest(value: int, workable: Sequence[int]) -> int:
    """Returns the workable value closest to `value`; of two equally close ones the larger."""
    return min(workable, key=lambda candidate: (abs(candidate - value), -candidate))


def nearest_divisor(value: int, n: int) -> int:
    """Returns the divisor of n closest to `value`."""
    return nearest(value, divisors(n))


def nearest_multiple(value: int, unit: int) -> int:
    """Returns the positive multiple of `unit` closest to `value`; of two equally close ones the larger."""
    return max(unit, (2 * value + unit) // (2 * unit) * unit)
