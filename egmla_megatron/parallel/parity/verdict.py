"""Which errors are rounding. Needs no torch."""

from __future__ import annotations

from typing import Any

__all__ = ["NUMBER_ERROR", "TENSOR_ERROR", "passes"]

# fp32 in another order of summation. Measured at most: losses 2e-7, norms 1.2e-6 (that of the fifth step), gradients of
# the first step 6e-6, weights after five steps 1.4e-5 (Adam divides by the root of small second moments, which enlarges
# rounding).
NUMBER_ERROR = {  # relative
    "loss": 1e-6,
    "grad_norm": 1e-6,
    "last_loss": 1e-6,
    "last_grad_norm": 5e-6,
    "evaluation": 1e-6,
}
TENSOR_ERROR = {"gradient": 1e-5, "weight": 4e-5}  # of the largest element of the tensor


def passes(errors: dict[str, Any]) -> bool:
    """Whether a rank's errors are rounding; with dropout only `drifted` is there to judge by."""
    if errors["drifted"] or "crashed" in errors:
        return False
    if "loss" not in errors:
        return True
    limits = {"initial": 0.0, **NUMBER_ERROR, **TENSOR_ERROR}
    return all(errors[kind] <= limit for kind, limit in limits.items())
