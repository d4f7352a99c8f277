"""Which column of an input holds what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from egmla_megatron.errors import UserError

__all__ = ["CLUSTER", "Columns", "Kind", "UnreadableError", "choose_column"]

CLUSTER = "cluster_id"  # ClimbMix's name
Kind = Literal["tokens", "text"]
_CLUSTER_TYPES = frozenset({"int", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"})  # fit an int64


class UnreadableError(Exception):
    """An input file that cannot be opened at all: cut off or damaged. The message names it."""


@dataclass(frozen=True)
class Columns:
    """Names to look for; tokens win where a file has both."""

    tokens: str
    text: str


def choose_column(name: str, types: Mapping[str, str], columns: Columns) -> tuple[Kind, str, str]:
    """(kind, column, cluster column or "") from {column: "ids" | "text" | what it is instead}.

    A cluster column that holds no whole numbers is not one.

    Raises:
        UserError: neither column is there, or it holds something else.
    """
    cluster = CLUSTER if types.get(CLUSTER) in _CLUSTER_TYPES else ""
    wanted: tuple[tuple[Kind, str, str, str], ...] = (
        ("tokens", columns.tokens, "ids", "lists of whole numbers"),
        ("text", columns.text, "text", "text"),
    )
    for kind, column, good, allowed in wanted:
        if column in types:
            if types[column] != good:
                option = f"--{kind}-column"
                raise UserError(
                    f"{name}: column {column!r}: got {types[column]}, allowed {allowed}; name another with {option}"
                )
            return kind, column, cluster
    raise UserError(
        f"{name}: got columns {', '.join(sorted(types)) or 'none'}, expected {columns.tokens!r} or {columns.text!r}; "
        "name the right one with --tokens-column or --text-column"
    )
