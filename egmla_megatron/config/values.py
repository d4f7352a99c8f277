"""Turns one raw configuration value into the type that its dataclass field asks for.

The field decides how a text is read, never the text itself. So `6e-4` is a number for a float field (YAML
1.1 calls it a string), `no` is no boolean, and a run may be named `007`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from types import NoneType
from typing import Any, Literal, get_args, get_origin

__all__ = ["as_text", "convert"]

_INTEGER = re.compile(r"[+-]?\d[\d_]*")
_MOST_DIGITS = 100  # Python refuses thousands of them in words of its own
_SCIENTIFIC = re.compile(r"\d+(\.\d+)?[eE]\+?\d+")


def convert(value: Any, hint: Any) -> Any:
    """Reads `value` (a text from YAML or the command line, or a plain Python value) as `hint`.

    `hint` is int, float, bool, str, a Literal of strings, tuple[str, ...], tuple[int, ...] or tuple[float, ...]. Raises
    ValueError whose text says what is allowed.
    """
    if get_origin(hint) is Literal:
        return _literal(value, get_args(hint))
    if get_origin(hint) is tuple:
        of = get_args(hint)[0]
        if of is str:
            return _strings(value)
        return _list(value, _integer, "whole numbers") if of is int else _list(value, _number, "finite numbers")
    readers = {bool: _boolean, int: _integer, float: _number, str: _string}
    return readers[hint](value)


def as_text(value: Any) -> str:
    """`value` as people write it after `section.key=`: true, [a,b], and texts and numbers as they are."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(as_text, value))}]"
    return str(value)


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ValueError("true or false")


def _integer(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        if len(value) <= _MOST_DIGITS and _INTEGER.fullmatch(value):
            return int(value)
        if _SCIENTIFIC.fullmatch(value) and float(value).is_integer():
            return int(float(value))  # 5e10 tokens is how people write a budget
    raise ValueError("a whole number")


def _number(value: Any) -> float:
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            return number
    raise ValueError("a finite number")


def _string(value: Any) -> str:
    if isinstance(value, str) and value.lower() not in ("null", "~"):
        return value
    raise ValueError("a text (write '' for none)")


def _literal(value: Any, allowed: tuple[str, ...]) -> str:
    if isinstance(value, str) and value in allowed:
        return value
    raise ValueError("one of " + ", ".join(allowed))


def _strings(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, (list, tuple)) and not any(isinstance(part, (dict, list, tuple, NoneType)) for part in value):
        return tuple(str(part) for part in value)
    raise ValueError("a list of texts, or one text with commas")


def _list[T](value: Any, read: Callable[[Any], T], what: str) -> tuple[T, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    try:
        return tuple(read(part.strip() if isinstance(part, str) else part) for part in parts)
    except (TypeError, ValueError):
        raise ValueError(f"a list of {what}") from None
