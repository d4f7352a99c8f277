"""The C library's heap on ranks that train on a CPU."""

from __future__ import annotations

import ctypes
import platform

__all__ = ["MAPPED_FROM", "map_large_blocks"]

_M_MMAP_THRESHOLD = -3  # <malloc.h>
MAPPED_FROM = 2**20  # bytes


def map_large_blocks() -> bool:
    """Gives every block from 1 MiB on a mapping of its own, which goes back to the system when it is freed.

    glibc raises that limit to the size of what is freed, up to 32 MiB, and then keeps activations of all sizes in one
    heap, which tears into gaps: the quickstart's rank grew to 1,534 MiB in 160 steps with never more than about 330 in
    use, and to 1,061 with this. It costs 6% of a step, for pages that are mapped anew (tools/records/README.md). False
    where there is no glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    return bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MAPPED_FROM))
