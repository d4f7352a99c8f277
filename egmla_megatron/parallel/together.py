"""An action of one rank or of all, whose failure anywhere ends it everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch.distributed as dist

from egmla_megatron.errors import MachineError, UserError
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
    problems: list[UserError | None] = [None] * world.size
    dist.all_gather_object(problems, _for_others(mine), group=world.control)
    if mine is not None:
        raise mine
    first = next((problem for problem in problems if problem is not None), None)
    if first is not None:
        raise first
    return cast(T, result)


def _for_others(error: Exception | None) -> UserError | None:
    """What the other ranks raise: of the same kind where it is one that is explained."""
    if isinstance(error, UserError):
        return (MachineError if isinstance(error, MachineError) else UserError)(str(error))
    return None if error is None else UserError(f"{type(error).__name__}: {error}")
