"""What a process finds around it: GPUs, and numbers in environment variables, which people and launchers set, so that
they may be anything."""

from __future__ import annotations

import ctypes
import os

from egmla_megatron.errors import UserError

__all__ = ["gpu_count", "whole_number"]


def gpu_count() -> int:
    """GPUs that CUDA shows to this process; the driver itself is asked, which knows CUDA_VISIBLE_DEVICES."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0  # no driver, no GPU
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def whole_number(name: str, default: int, least: int) -> int:
    """The variable `name`, or `default` where it is not set or empty.

    Raises:
        UserError: it is no whole number from `least`.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) >= least):
        raise UserError(f"{name}: got {text}, allowed a whole number from {least}; set it to one, or unset it")
    return int(text)
