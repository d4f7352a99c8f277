"""Forward and backward of a step as one CUDA graph: the host, which is slower than the GPU here, only replays it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from egmla_megatron.data.batch import Batch

__all__ = ["GraphedPasses"]

EAGER_STEPS = 3  # before capture: allocators, communicators and kernels that are tuned or compiled come to rest

# micro-batches -> what the schedule returns for them
Schedule = Callable[[Iterator[Batch]], list[dict[str, Tensor]]]


class GraphedPasses:
    """Runs a schedule eagerly a few times, then captures it with gradient reductions and the gate exchange, and
    replays. Shapes must not change: rows of the gating tables are padded to the most that were seen, and more than
    that mean another capture.

    Args:
        schedule: all forward and backward passes of a step, without host synchronisation and host randomness.
        num_microbatches: of one step.
    """

    def __init__(self, schedule: Schedule, num_microbatches: int) -> None:
        self.schedule, self.num_microbatches = schedule, num_microbatches
        self.steps = 0
        self.sizes: tuple[int, ...] = ()  # rows of the captured graph
        self.static: list[Batch] = []
        self.outputs: list[dict[str, Tensor]] = []
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, batches: Iterator[Batch]) -> list[dict[str, Tensor]]:
        """As the schedule. What it returns is overwritten by the next call."""
        step = [next(batches) for _ in range(self.num_microbatches)]
        sizes = self._largest(step)
        self.steps += 1
        if self.steps <= EAGER_STEPS:
            self.sizes = sizes
            return self.schedule(iter(step))
        step = [_grown(batch, sizes) for batch in step]
        if self.graph is None or sizes != self.sizes:
            self.sizes = sizes
            self._capture(step)
        for fixed, batch in zip(self.static, step, strict=True):
            _copy(batch, fixed)
        assert self.graph is not None
        self.graph.replay()
        return self.outputs

    def release(self) -> None:
        """Give the graph up. Before process groups are destroyed: NCCL waits for graphs that hold a communicator."""
        if self.graph is not None:
            self.graph.reset()
        self.graph, self.static, self.outputs = None, [], []

    def _largest(self, step: list[Batch]) -> tuple[int, ...]:
        """Rows that all micro-batches so far fit into."""
        found = [batch.gate_ids.sizes for batch in step if batch.gate_ids is not None]
        if not found:
            return ()
        return tuple(map(max, zip(self.sizes or found[0], *found, strict=True)))

    def _capture(self, step: list[Batch]) -> None:
        self.graph, self.outputs = None, []  # its memory first
        self.static = [_clone(batch) for batch in step]
        graph = torch.cuda.CUDAGraph()
        # other threads of the process (loader, watchdogs) may call CUDA meanwhile
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            self.outputs = self.schedule(iter(self.static))
        self.graph = graph


def _grown(batch: Batch, sizes: tuple[int, ...]) -> Batch:
    ids = batch.gate_ids
    return batch if ids is None else replace(batch, gate_ids=ids.grown(sizes, batch.tokens_BS.numel()))


def _tensors(batch: Batch) -> list[Tensor]:
    ids = batch.gate_ids.tensors if batch.gate_ids is not None else ()
    found = (batch.tokens_BS, batch.labels_BS, batch.loss_mask_BS, batch.position_ids_BS, *ids)
    return [tensor for tensor in found if tensor is not None]


def _clone(batch: Batch) -> Batch:
    ids = batch.gate_ids and replace(
        batch.gate_ids, **{name: x.clone() for name, x in vars(batch.gate_ids).items() if x is not None}
    )
    names = ("tokens_BS", "labels_BS", "loss_mask_BS", "position_ids_BS")
    return replace(batch, **{name: getattr(batch, name).clone() for name in names}, gate_ids=ids)


def _copy(source: Batch, target: Batch) -> None:
    for new, fixed in zip(_tensors(source), _tensors(target), strict=True):
        fixed.copy_(new, non_blocking=True)
