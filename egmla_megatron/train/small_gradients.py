"""Gradients of norms and biases, added to the main gradients together: alone, each is a kernel that takes longer to
start than to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Parameter

__all__ = ["SMALL", "SmallGradients"]

SMALL = 2**16  # elements of a parameter, at most


@dataclass
class _Bucket:
    """Parameters whose gradients are reduced together."""

    parameters: int
    arrived: int = 0  # gradients of this backward pass
    waiting: dict[Parameter, Callable[[], None]] = field(default_factory=dict)  # each once, however often it arrived


class SmallGradients:
    """Holds small gradients back until all of their bucket are there or the backward pass (of a recomputed part, that
    part's) is over, whichever comes first."""

    def __init__(self) -> None:
        self.buckets: dict[int, _Bucket] = {}
        self.plain: dict[int, Callable[[], None]] = {}
        self.called_back = False

    def hook(
        self, parameter: Parameter, bucket: int, parameters: int, plain: Callable[..., None]
    ) -> Callable[..., None]:
        """What to call when a parameter has its gradient.

        Args:
            bucket: which one it belongs to.
            parameters: of that bucket.
            plain: megatron-core's hook, which adds `parameter.grad` to `parameter.main_grad` unless
                `parameter.grad_added_to_main_grad`, and counts it for the reduction.
        """
        mine, key = self.buckets.setdefault(bucket, _Bucket(parameters)), id(parameter)
        self.plain[key] = plain
        # megatron-core adds those that are marked so in any case
        small = parameter.numel() <= SMALL and not getattr(parameter, "zero_out_wgrad", False)

        def arrived(*_: object) -> None:
            plain = self.plain[key]
            mine.arrived += 1
            if small and parameter.grad is not None and not parameter.grad_added_to_main_grad:  # type: ignore[attr-defined]
                mine.waiting[parameter] = plain
                self._call_back()
            else:
                plain()
            if mine.arrived == mine.parameters:
                _add(mine)

        return arrived

    def reset(self) -> None:
        """Forget what a backward pass that failed has left. Between steps."""
        self.called_back = False
        for bucket in self.buckets.values():
            for parameter in bucket.waiting:
                parameter.grad = None
            bucket.waiting, bucket.arrived = {}, 0

    def release(self) -> None:
        """Forget megatron-core's hooks, which hold the model. No backward pass may follow."""
        self.plain.clear()

    def _call_back(self) -> None:
        """A parameter that the loss does not depend on never arrives."""
        if not self.called_back:
            self.called_back = True
            Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self.called_back = False
        for bucket in self.buckets.values():
            _add(bucket)


def _add(bucket: _Bucket) -> None:
    bucket.arrived = 0
    if not bucket.waiting:
        return
    waiting, bucket.waiting = bucket.waiting, {}
    mains: list[Tensor] = [parameter.main_grad for parameter in waiting]  # type: ignore[attr-defined]
    # of one type first: additions of several types are a kernel each
    found = torch.cat([parameter.grad.flatten() for parameter in waiting]).to(mains[0].dtype)  # type: ignore[union-attr]
    pieces = found.split([main.numel() for main in mains])
    torch._foreach_add_(mains, [piece.view_as(main) for piece, main in zip(pieces, mains, strict=True)])
    for parameter, plain in waiting.items():
        parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        plain()
        parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
