"""Which errors are rounding. Needs no torch."""

from __future__ import annotations

from typing import Any

__all__ = ["NUMBERS", "NUMBER_ERROR", "TENSORS", "TENSOR_ERROR", "passes"]

NUMBERS = ("loss", "grad_norm", "last_loss", "last_grad_norm", "evaluation")
TENSORS = ("gradient", "weight")
# fp32; five steps in another order of summation measure up to 3e-7 and 5e-6
NUMBER_ERROR = 1e-6  # relative
TENSOR_ERROR = 1e-5  # of the largest element of the tensor


def passes(errors: dict[str, Any]) -> bool:
    """Whether a rank's errors are rounding; with dropout only `drifted` is there to judge by."""
    if errors["drifted"]:
        return False
    if "loss" not in errors:
        return True
    near = all(errors[key] <= NUMBER_ERROR for key in NUMBERS)
    return near and errors["initial"] == 0 and all(errors[kind] <= TENSOR_ERROR for kind in TENSORS)
