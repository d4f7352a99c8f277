"""Widths of the parts of an attention head."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["HeadSizes"]


class HeadSizes(NamedTuple):
    """Elements per head."""

    nope: int
    rope: int
    v: int
