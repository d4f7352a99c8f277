"""One optimizer step, and one forward-only evaluation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from egmla_megatron.config.schema import RunConfig
from egmla_megatron.data.batch import Batch
from egmla_megatron.parallel.world import World
from egmla_megatron.train.device_adam import single_optimizers
from egmla_megatron.train.graph import GraphedPasses
from egmla_megatron.train.step_times import StepTimes
from egmla_megatron.train.update import Update, update_weights

__all__ = ["StepInFlight", "StepResult", "evaluate", "graphed_passes", "launch_step", "train_step"]


@dataclass(frozen=True)
class StepResult:
    """What one step gave."""

    loss: float  # nats per token, mean over the global batch
    grad_norm: float  # before clipping
    applied: bool  # False: NaN or Inf, the weights were left alone


def _forward_step(iterator: Iterator[Batch], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """The loss is a sum and a number of tokens: megatron-core divides, per micro-batch, or by the tokens of the whole
    global batch where masks make micro-batches unequal (`calculate_per_token_loss`, see config.to_mcore)."""
    batch = next(iterator)

    def loss_function(loss_per_token_BS: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        mask_BS = batch.loss_mask_BS
        total, count = (loss_per_token_BS.float() * mask_BS).sum(), mask_BS.sum()
        # cloned: the schedule scales the loss in place
        return total, count.to(torch.int), {"loss_and_count": torch.stack([total.detach().clone(), count])}

    inputs = (batch.tokens_BS, batch.position_ids_BS, None)
    return model(*inputs, labels=batch.labels_BS, gate_ids=batch.gate_ids), loss_function


def _for_each_chunk(batches: Iterator[Batch], chunks: int) -> list[Iterator[Batch]]:
    """Iterators that all give the same micro-batches, whichever asks first; a batch is kept until the last has it.

    Every chunk needs the ids for its tables. No chunk waits for another rank here: sending tokens along inside the
    schedule would deadlock it.
    """
    waiting: list[deque[Batch]] = [deque() for _ in range(chunks)]

    def of_chunk(mine: deque[Batch]) -> Iterator[Batch]:
        while True:
            if not mine:
                batch = next(batches)
                for each in waiting:
                    each.append(batch)
            yield mine.popleft()

    return [of_chunk(mine) for mine in waiting]


def _run_schedule(
    cfg: RunConfig,
    world: World,
    model: list[Any],
    batches: Iterator[Batch],
    num_microbatches: int,
    *,
    forward_only: bool,
) -> list[dict[str, Tensor]]:
    chunks = len(model)
    schedule = get_forward_backward_func(pp_size=world.layout.pp, vp_size=chunks if chunks > 1 else None)
    return schedule(
        forward_step_func=_forward_step,
        data_iterator=_for_each_chunk(batches, chunks),
        model=model,
        num_microbatches=num_microbatches,
        seq_length=cfg.train.seq_length,
        micro_batch_size=cfg.train.micro_batch_size,
        forward_only=forward_only,
    )


def _mean_loss(outputs: list[dict[str, Tensor]], world: World) -> Tensor:
    """Mean over the tokens that count of the global batch, known on every rank (scalar on the device)."""
    if world.is_last_stage:
        both = torch.stack([output["loss_and_count"] for output in outputs]).double().sum(dim=0)
        dist.all_reduce(both, group=world.groups.dp_cp)
        loss = (both[0] / both[1].clamp(min=1.0)).float()
    else:
        loss = torch.zeros((), device=world.device)
    if world.groups.pp.size() > 1:
        last = dist.get_process_group_ranks(world.groups.pp)[-1]
        dist.broadcast(loss, src=last, group=world.groups.pp)
    return loss


class StepInFlight:
    """A step that the host has launched; the device may still work on it.

    Args:
        loss: mean over the global batch, on the device.
        optimizer: whose step it is.
    """

    def __init__(self, loss: Tensor, update: Update, optimizer: Any) -> None:
        self._optimizer, self._found, self._done = optimizer, None, None
        if isinstance(update.norm, Tensor) and isinstance(update.applied, Tensor):
            numbers = torch.cat([loss.float().reshape(1), update.norm, update.applied])
            self._numbers = torch.empty(3, pin_memory=loss.is_cuda)
            self._numbers.copy_(numbers, non_blocking=True)
            if loss.is_cuda:
                self._done = torch.cuda.Event()
                self._done.record()
        else:
            self._found = StepResult(float(loss), float(update.norm), bool(update.applied))

    @property
    def finished(self) -> bool:
        """Whether the launch itself waited for its end: nothing is won by launching another first."""
        return self._done is None

    def result(self) -> StepResult:
        """What the step gave; waits for the device until it is done, and leaves later work alone."""
        if self._found is None:
            if self._done is not None:
                self._done.synchronize()
            loss, norm, applied = self._numbers.tolist()
            self._found = StepResult(loss, norm, bool(applied))
            if not applied:
                for each in single_optimizers(self._optimizer):
                    each.optimizer.take_back()
        return self._found


def graphed_passes(cfg: RunConfig, world: World, model: list[Any]) -> GraphedPasses | None:
    """For `launch_step`, where `train.cuda_graph` asks for it."""
    if not cfg.train.cuda_graph:
        return None
    count = world.layout.num_microbatches
    return GraphedPasses(lambda batches: _run_schedule(cfg, world, model, batches, count, forward_only=False), count)


def launch_step(
    cfg: RunConfig,
    world: World,
    model: list[Any],
    optimizer: Any,
    batches: Iterator[Batch],
    graph: GraphedPasses | None = None,
    times: StepTimes | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> StepInFlight:
    """Forward and backward over the global batch, then the optimizer. With an optimizer that the device decides
    (`device_adam`) the host waits for nothing: the next step may be launched before this one is done. Else it waits for
    the device at the end, for the norm.

    Args:
        model: the DDP-wrapped chunks of this rank.
        batches: this rank's micro-batches.
        graph: of this run (`graphed_passes`); None: every operation is launched by the host.
        times: of this run; measures the step.
        meanwhile: called once all passes are launched, when the host would only wait for the device.
    """
    with times.step() if times is not None else nullcontext():
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        if graph is not None:
            outputs = graph(batches)
        else:
            outputs = _run_schedule(cfg, world, model, batches, world.layout.num_microbatches, forward_only=False)
        if times is not None:
            times.passes_done()
        loss = _mean_loss(outputs, world)
        if meanwhile is not None:
            meanwhile()
        update = update_weights(optimizer, cfg.optimizer.clip_grad)
    return StepInFlight(loss, update, optimizer)


def train_step(*args: Any, **kwargs: Any) -> StepResult:
    """As `launch_step`, and waits for the step's end."""
    return launch_step(*args, **kwargs).result()


@torch.no_grad()
def evaluate(cfg: RunConfig, world: World, model: list[Any], batches: Iterator[Batch], num_microbatches: int) -> float:
    """Mean loss in nats per token over `num_microbatches` per rank, dropout off."""
    for chunk in model:
        chunk.eval()
    try:
        outputs = _run_schedule(cfg, world, model, batches, num_microbatches, forward_only=True)
        return float(_mean_loss(outputs, world))
    finally:
        for chunk in model:
            chunk.train()
