"""Clipping and the optimizer's step, decided by the host or, where the optimizer can, by the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from egmla_megatron.train.deferred_rows import deferred_rows
from egmla_megatron.train.device_adam import plan_of, single_optimizers

__all__ = ["Update", "update_weights"]


@dataclass(frozen=True)
class Update:
    """What became of a step's gradients. Numbers where the host knows them, else tensors of one element."""

    norm: float | Tensor  # before clipping
    applied: bool | Tensor  # False, 0: NaN or Inf, the weights were left alone


def update_weights(optimizer: Any, clip: float) -> Update:
    """Clip the gradients to the norm `clip` (0: do not) and step, unless they are not finite.

    The norm is the same number on all ranks, so all of them skip or none does. On the device nothing waits for it.
    """
    plan = plan_of(optimizer)
    if plan is None:
        return _by_the_host(optimizer, clip)
    if optimizer.prepare_grads():
        raise RuntimeError("a loss scale found NaN or Inf: there is none with bf16")
    norm_1 = _norm_on_device(optimizer).to(plan.count_1.device)
    updates = max(each.optimizer.updates() for each in single_optimizers(optimizer))
    applied_1 = plan.decide(norm_1, clip, updates).clone()  # the next update writes there
    optimizer.step_with_ready_grads()
    return Update(norm_1, applied_1)


def _norm_on_device(optimizer: Any) -> Tensor:
    """As megatron-core's, whose sum over optimizers of different groups would wait for the device."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    by_rows = bool(deferred_rows(optimizer))
    if not by_rows and (len(chained) == 1 or optimizer.grads_states_parallel_group_is_shared()):
        return torch.as_tensor(optimizer.get_grad_norm()).reshape(1).float()
    return torch.stack([_squares(each) for each in chained]).sum(0).sqrt()


def _squares(optimizer: Any) -> Tensor:
    """Sum of the squares of a single optimizer's gradients over its group of ranks [1], fp32."""
    rows = [] if getattr(optimizer, "is_stub_optimizer", False) else deferred_rows(optimizer)
    if not rows:
        return torch.as_tensor(optimizer.get_grad_norm()).reshape(1).float().square()
    by_rows = {each.weight_VLC.main_grad.data_ptr(): each for each in rows}  # type: ignore[attr-defined]
    squares = []
    for grad in optimizer.get_grads_for_grad_norm():  # none that other ranks count
        found = by_rows.get(grad.data_ptr())
        squares.append(found.squares() if found is not None else grad.float().square().sum().reshape(1))
    total_1 = torch.stack(squares).sum(0) if squares else rows[0].rows.history_H3.new_zeros(1)
    group = optimizer.get_grad_stats_parallel_group()
    if group.size() > 1:
        dist.all_reduce(total_1, group=group)
    return total_1


def _by_the_host(optimizer: Any, clip: float) -> Update:
    found_inf = optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if found_inf or not math.isfinite(norm):
        return Update(norm, False)
    if clip > 0:
        for each in single_optimizers(optimizer):
            parameters = each.get_parameters()
            if parameters:
                # where Adam keeps the master weights, gradients of another type than the weights stand beside `grad`
                decoupled = each.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                clip_grad_by_total_norm_fp32(parameters, clip, norm, use_decoupled_grad=decoupled)
    return Update(norm, bool(optimizer.step_with_ready_grads()))
