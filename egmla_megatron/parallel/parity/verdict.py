"""Which errors are rounding. Needs no torch."""

from __future__ import annotations

from typing import Any

__all__ = ["NUMBERS", "NUMBER_ERROR", "TENSOR_ERROR", "passes"]

NUMBERS = ("loss", "grad_norm", "last_loss", "last_grad_norm", "evaluation")
# fp32 in another order of summation. Measured at most: numbers 5e-7, gradients of the first step 6e-6, weights after
# five steps 1.4e-5 (Adam divides by the root of small second moments, which enlarges rounding).
NUMBER_ERROR = 1e-6  # relative
TENSOR_ERROR = {"gradient": 1e-5, "weight": 4e-5}  # of the largest element of the tensor


def passes(errors: dict[str, Any]) -> bool:
    """Whether a rank's errors are rounding; with dropout only `drifted` is there to judge by."""
    if errors["drifted"] or "crashed" in errors:
        return False
    if "loss" not in errors:
        return True
    near = all(errors[key] <= NUMBER_ERROR for key in NUMBERS)
    return near and errors["initial"] == 0 and all(errors[kind] <= limit for kind, limit in TENSOR_ERROR.items())
