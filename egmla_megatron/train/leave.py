"""The end of a process, also of one that has profiled a GPU."""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress

__all__ = ["gpu_is_profiled", "leave"]

_profiled: list[bool] = []  # of this process; not empty: a GPU was


def gpu_is_profiled() -> None:
    """Said when a profiler of the GPU starts."""
    _profiled.append(True)


def leave(code: int) -> int:
    """The exit code `code`; a process that has profiled a GPU ends here, its exit functions run.

    torch 2.11's profiler frees buffers that NVIDIA's CUPTI still writes to when libraries are unloaded (pytorch pull
    request 195207): runs that were done, saved and reported ended with "double free or corruption" and code -6.
    """
    if _profiled:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # a closed terminal or pipe
                stream.flush()
        os._exit(code)
    return code
