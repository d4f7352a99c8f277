"""The end of a process that has profiled a GPU."""

from __future__ import annotations

import atexit
import os
import sys

__all__ = ["leave_after_profile"]


def leave_after_profile(code: int) -> None:
    """End the process with `code`, exit functions run, without unloading libraries.

    torch 2.11's profiler frees buffers that NVIDIA's CUPTI still writes to when it is unloaded (pytorch pull request
    195207): runs that were done, saved and reported ended with "double free or corruption" and code -6, 3 of 5 of them.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
