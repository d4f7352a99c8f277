"""An action of one rank or of all, whose failure anywhere ends it everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch.distributed as dist

from egmla_megatron.errors import UserError
from egmla_megatron.parallel.world import World

__all__ = ["together"]


def together[T](world: World, action: Callable[[], T]) -> T:
    """What `action` gives on this rank; an error on every rank when it raises one on any: none is left waiting.

    `action` must not call a collective: the rank that fails would miss it.
    """
    result, mine = None, None
    try:
        result = action()
    except Exception as error:  # raised again below, once the others know
        mine = error
    problems: list[str | None] = [None] * world.size
    text = None if mine is None else str(mine) if isinstance(mine, UserError) else f"{type(mine).__name__}: {mine}"
    dist.all_gather_object(problems, text, group=world.control)
    if mine is not None:
        raise mine
    first = next((problem for problem in problems if problem is not None), None)
    if first is not None:
        raise UserError(first)
    return cast(T, result)
