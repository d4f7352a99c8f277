"""Numbers in environment variables: they come from people and from launchers, so they may be anything."""

from __future__ import annotations

import os

from egmla_megatron.errors import UserError

__all__ = ["whole_number"]


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
