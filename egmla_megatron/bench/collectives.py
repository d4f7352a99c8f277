"""Counts what one rank sends, from the collectives that really run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from egmla_megatron.bench.ring import ring_bytes

__all__ = ["Collective", "CollectiveCounter"]

_INPUTS = ("tensors", "input", "input_tensor", "inputs", "input_tensors")
_SILENT = ("barrier", "recv_", "recv_any_source_")  # nothing of the payload leaves this rank


@dataclass(frozen=True)
class Collective:
    """One collective of this rank."""

    name: str  # torch's operator: allreduce_, _allgather_base_, ...
    ranks: int
    sent_bytes: float  # by the ring formula, see `ring_bytes`


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Sequence):
        return sum(map(_bytes, value))
    return 0


class CollectiveCounter(TorchDispatchMode):
    """`with CollectiveCounter() as counter: step()` records every collective of torch.distributed on this rank.

    It sees the calls where torch dispatches them, backward's and coalesced ones included, with the very tensors and
    groups, alike for gloo and NCCL (gloo's profiler events lack the group). Nothing of a library is rebound. A
    replayed CUDA graph dispatches nothing: count its collectives while they are captured.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Collective] = []

    @property
    def sent_bytes(self) -> float:
        """By this rank, in all."""
        return sum(each.sent_bytes for each in self.found)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._record(func, args)
        elif func.namespace == "_c10d_functional" and "wait" not in func._schema.name:
            raise NotImplementedError(f"functional collectives are not counted: {func}")
        return func(*args, **(kwargs or {}))

    def _record(self, func: Any, args: Sequence[Any]) -> None:
        name = func._schema.name.removeprefix("c10d::")
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
        if name in _SILENT:
            return
        group = dist.ProcessGroup.unbox(given["process_group"])
        payload = next(given[key] for key in _INPUTS if key in given)
        size = _bytes(payload)
        if given.get("input_split_sizes"):  # unequal parts: all but what stays here
            mine = given["input_split_sizes"][group.rank()]
            sent: float = size - mine * _bytes(payload[:1])
        else:
            sent = ring_bytes(name, size, group.size())
        self.found.append(Collective(name, group.size(), sent))
