"""One optimizer step, and one forward-only evaluation."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from egmla_megatron.config.schema import RunConfig
from egmla_megatron.data.batch import Batch
from egmla_megatron.parallel.world import World
from egmla_megatron.train.graph import GraphedPasses
from egmla_megatron.train.step_times import StepTimes

__all__ = ["StepResult", "evaluate", "graphed_passes", "train_step"]


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


def _apply(optimizer: Any, clip: float) -> tuple[float, bool]:
    """Clip and step; returns (gradient norm, applied). A norm that is not finite leaves the weights alone.

    The norm is the same number on all ranks, so all of them skip or none does.
    """
    found_inf = optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if found_inf or not math.isfinite(norm):
        return norm, False
    if clip > 0:
        for each in getattr(optimizer, "chained_optimizers", [optimizer]):
            parameters = [] if getattr(each, "is_stub_optimizer", False) else each.get_parameters()
            if parameters:
                # where Adam keeps the master weights, gradients of another type than the weights stand beside `grad`
                decoupled = each.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                clip_grad_by_total_norm_fp32(parameters, clip, norm, use_decoupled_grad=decoupled)
    return norm, bool(optimizer.step_with_ready_grads())


def graphed_passes(cfg: RunConfig, world: World, model: list[Any]) -> GraphedPasses | None:
    """For `train_step`, where `train.cuda_graph` asks for it."""
    if not cfg.train.cuda_graph:
        return None
    count = world.layout.num_microbatches
    return GraphedPasses(lambda batches: _run_schedule(cfg, world, model, batches, count, forward_only=False), count)


def train_step(
    cfg: RunConfig,
    world: World,
    model: list[Any],
    optimizer: Any,
    batches: Iterator[Batch],
    graph: GraphedPasses | None = None,
    times: StepTimes | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> StepResult:
    """Forward and backward over the global batch, then the optimizer. The host waits for the device only at the end,
    for the norm and the loss.

    Args:
        model: the DDP-wrapped chunks of this rank.
        batches: this rank's micro-batches.
        graph: of this run (`graphed_passes`); None: every operation is launched by the host.
        times: of this run; measures the step and can be read when it has returned.
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
        norm, applied = _apply(optimizer, cfg.optimizer.clip_grad)
    return StepResult(float(loss), norm, applied)


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
