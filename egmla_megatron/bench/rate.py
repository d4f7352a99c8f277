"""Link rates as tc writes them."""

from __future__ import annotations

import re

from egmla_megatron.errors import UserError

__all__ = ["bits_per_second"]

_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def bits_per_second(rate: str) -> float:
    """400mbit -> 4e8.

    Raises:
        UserError: no number with a unit, or below 1mbit, where a training step takes for ever.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate.lower())
    bits = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 1e6 <= bits <= 1e12:
        raise UserError(f"--link: got {rate}, allowed 1mbit to 1000gbit; write it like 400mbit or 3.1gbit")
    return bits
