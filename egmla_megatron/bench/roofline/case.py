"""What is timed: a kernel, how often a micro-batch calls it, what it costs at least, and calls on fresh buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from egmla_megatron.bench.roofline.cost import Cost

__all__ = ["Buffers", "Call", "Case", "Differentiable", "forward_and_backward"]


@dataclass(frozen=True)
class Buffers:
    """Makes tensors of the model's type on its device."""

    device: torch.device
    dtype: torch.dtype

    def normal(self, *shape: int, grad: bool = False, dtype: torch.dtype | None = None) -> Tensor:
        """Standard normal numbers; zeros would let a GPU run faster than it can with data."""
        drawn = torch.randn(*shape, device=self.device, dtype=dtype or self.dtype)
        return drawn.requires_grad_(grad)


@dataclass(frozen=True)
class Call:
    """One call of a kernel on buffers of its own, to be made once: a backward pass may give its inputs up."""

    read: tuple[Tensor, ...]  # what the kernel must read
    run: Callable[[Any], Any]  # timed; takes what `before` returned, returns what it wrote
    before: Callable[[], Any] | None = None  # not timed: the forward pass of a gradient
    reads_before: bool = False  # the kernel must also read what `before` returned


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    kernel: str
    direction: str  # forward, backward, input gradient, weight gradient, update
    count: float  # calls in a micro-batch
    cost: Cost  # of one call
    prepare: Callable[[], Call]
    counted: bool = True  # belongs to the sum; False: another way to compute what a row beside it computes
    scale: float = 1.0  # work in the model / work in the call that is timed

    @property
    def title(self) -> str:
        """For messages."""
        return f"{self.kernel}, {self.direction}"


_Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Differentiable:
    """A function whose forward and backward pass are timed each alone."""

    kernel: str
    count: float
    costs: tuple[Cost, Cost]  # forward, backward
    function: Callable[..., Any]  # of the inputs -> a tensor or a tuple of them
    inputs: Callable[[], _Tensors]  # fresh ones; those that require a gradient get it
    gradients: Callable[[], _Tensors]  # fresh ones, of the outputs
    forward_reads: Callable[[_Tensors], _Tensors] = lambda inputs: inputs  # which inputs each pass must read
    backward_reads: Callable[[_Tensors], _Tensors] = lambda inputs: inputs
    backward_reads_outputs: bool = False
    counted: bool = True


def forward_and_backward(what: Differentiable) -> list[Case]:
    """Two rows."""

    def forward() -> Call:
        inputs = what.inputs()
        return Call(what.forward_reads(inputs), lambda _: what.function(*inputs))

    def backward() -> Call:
        inputs, gradients = what.inputs(), what.gradients()
        leaves = [each for each in inputs if each.requires_grad]

        def outputs() -> _Tensors:
            found = what.function(*inputs)
            return found if isinstance(found, tuple) else (found,)

        return Call(
            read=(*what.backward_reads(inputs), *gradients),
            run=lambda found: torch.autograd.grad(found, leaves, gradients),
            before=outputs,
            reads_before=what.backward_reads_outputs,
        )

    return [
        Case(what.kernel, "forward", what.count, what.costs[0], forward, what.counted),
        Case(what.kernel, "backward", what.count, what.costs[1], backward, what.counted),
    ]
