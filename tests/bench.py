"""A benchmark result with fixed numbers, shared by the tests of what is made of it."""

from __future__ import annotations

from typing import Any

KEYS = (
    "variant",
    "gate_world",
    "link_gb_per_s",
    "step_ms_median",
    "step_ms_p10",
    "step_ms_p90",
    "n",
    "tokens_per_second",
    "peak_mib",
    "exchange_ms",
    "exposed_ms",
    "bytes_sent_per_rank",
    "bytes_predicted_per_rank",
)


def fixed_row(variant: str, step_ms: float, peak_mib: float | None, exchange_ms: float) -> dict[str, Any]:
    """A row as `make_row` makes it."""
    return {
        "variant": variant,
        "gate_world": 2,
        "link_gb_per_s": 3.1,
        "step_ms_median": step_ms,
        "step_ms_p10": step_ms - 2,
        "step_ms_p90": step_ms + 5,
        "n": 20,
        "tokens_per_second": 16384 / step_ms * 1e3,
        "peak_mib": peak_mib,
        "exchange_ms": exchange_ms,
        "exposed_ms": exchange_ms / 2,
        "bytes_sent_per_rank": 1_000_000_000,
        "bytes_predicted_per_rank": 990_000_000,
        "gate_group": 2 if exchange_ms else 1,
        "wire_bytes_per_rank": None,
        "step_ms_median_of_rounds": [step_ms, step_ms],
        "loss_first": 10.8,
        "loss_last": 9.5,
    }


def fixed_result(peak: bool = True) -> dict[str, Any]:
    """A whole result of two variants."""
    return {
        "hardware": {"cpu": "some CPU", "gpu": "some GPU"},
        "software": {},
        "commit": None,
        "settings": {
            "config": {"model": {"name": "some_model"}},
            "ranks": 2,
            "tokens_per_rank": 8192,
            "unique_fraction": 0.21,
            "precision": "bf16",
            "gradients": "fp32",
            "overlap": True,
            "distributed_optimizer": False,
        },
        "link": {"gb_per_s": 3.1, "payload_mib": 256, "n": 5},
        "rows": [
            fixed_row("vanilla", 400.0, 10_000.0 if peak else None, 0.0),
            fixed_row("dimension_wise_all_to_all", 200.0, 8_800.0 if peak else None, 10.0),
        ],
    }
