"""megatron-core's data-parallel wrapper with less work in a step: main gradients that are written over are not zeroed,
small gradients are added together, and those of tables are scaled before they become as large as the tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor
from torch.nn import Parameter

from egmla_megatron.attention.token_table import GateTable
from egmla_megatron.train.deferred_rows import DeferredRows
from egmla_megatron.train.small_gradients import SmallGradients

__all__ = ["DataParallel", "gaps"]


class DataParallel(DistributedDataParallel):
    """Weight gradients that layers add to the main gradients themselves are written by a step's first micro-batch and
    added by the others: nothing has to be zeroed before or read. Transformer Engine and `attention.main_gradient` read
    `overwrite_main_grad` of a weight in forward, for the backward that belongs to it.

    Args:
        written: the weights for which that holds, see `optimizer.wrap_ddp`.
        args, kwargs: as megatron-core's.
    """

    def __init__(self, *args: Any, written: list[Parameter], **kwargs: Any) -> None:
        self.small = SmallGradients()  # the parent makes hooks
        super().__init__(*args, **kwargs)
        self.written = written
        self.deferred: list[DeferredRows] = []  # tables whose updates leave zeros behind
        self.first = False  # whether the next forward is the step's first
        self._scale_tables()

    def _scale_tables(self) -> None:
        """Of the tables' gradients only those of the rows that were read need the factor of the ranks' mean; behind it
        their reduction is a sum."""
        tables = {id(module.weight) for module in self.module.modules() if isinstance(module, GateTable)}
        scale = 1.0 if self.config.calculate_per_token_loss else 1.0 / self.dp_cp_group.size()
        for group in self.expert_parallel_bucket_groups:
            if all(id(weight) in tables for bucket in group.buckets for weight in bucket.params):
                group.ddp_config = replace(group.ddp_config, average_in_collective=False)
                for bucket in group.buckets:
                    bucket.gradient_scaling_factor = 1.0
                    for weight in bucket.params:
                        weight.gradient_scale = scale

    def zero_grad_buffer(self) -> None:
        """As megatron-core's, at the beginning of a step."""
        self.small.reset()
        for parameter in self.params_with_grad:
            parameter.grad_added_to_main_grad = False
        clean = {id(rows.weight_VLC) for rows in self.deferred if rows.steps}
        skipped = clean | {id(weight) for weight in self.written}
        for buffer in self.buffers + self.expert_parallel_buffers:
            kept = [place[:2] for weight, place in buffer.param_index_map.items() if id(weight) in skipped]
            if kept:
                pieces = [buffer.grad_data[start:end] for start, end in gaps(kept, buffer.grad_data.numel())]
                pieces += buffer.extra_main_grads
                if pieces:
                    torch._foreach_zero_(pieces)
            else:
                buffer.reset()
        for group in self.bucket_groups + self.expert_parallel_bucket_groups:
            group.reset()
        self._write(True)

    def forward(self, *inputs: Any, **kwargs: Any) -> Tensor:
        """As megatron-core's."""
        output = super().forward(*inputs, **kwargs)
        if self.first and torch.is_grad_enabled():
            self._write(False)
        return output

    def release(self) -> None:
        """Let go of the model, which would outlive its last reference: autograd's nodes hold hooks, and are no part of
        what Python's collector sees. No backward pass may follow."""
        self.small.release()

    def _make_backward_post_hook(self, param: Parameter) -> Callable[..., None]:
        """As megatron-core's, for small gradients later."""
        plain = super()._make_backward_post_hook(param)
        bucket = self.param_to_bucket_group.get(param)
        return plain if bucket is None else self.small.hook(param, id(bucket), len(bucket.params), plain)

    def _write(self, first: bool) -> None:
        self.first = first
        for weight in self.written:
            weight.overwrite_main_grad = first  # type: ignore[attr-defined]


def gaps(kept: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """What of `size` elements lies in none of the disjoint ranges `kept`, as ranges in order."""
    ordered = sorted(kept)
    starts, ends = [0, *(end for _, end in ordered)], [*(start for start, _ in ordered), size]
    return [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]
