"""The optimizer's update of all weights, timed on a part of them, and of the rows of the gating tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from egmla_megatron.bench.roofline import cost
from egmla_megatron.bench.roofline.case import Buffers, Call, Case
from egmla_megatron.config.schema import OptimizerConfig, RunConfig
from egmla_megatron.config.to_mcore import optimizer_config
from egmla_megatron.model.count import count_parameters
from egmla_megatron.report.memory import unique_fraction

__all__ = ["update_cases"]

MOST_ELEMENTS = {"cuda": 2**27, "cpu": 2**20}  # of the buffer that is updated; larger ones take proportionally longer


def update_cases(cfg: RunConfig, microbatches: int, distinct: int, buffers: Buffers) -> list[Case]:
    """AdamW of fp32 gradients, moments and master weights over all of the model's parameters; gating tables among them,
    or by the rows that a step reads.

    Args:
        microbatches: of an optimizer step.
        distinct: ids of a micro-batch.
    """
    counted = count_parameters(cfg.model)
    fused = optimizer_config(cfg).use_precision_aware_optimizer  # as the trainer's, where it can
    by_rows = fused and cfg.optimizer.deferred_table_updates and counted.gate_tables > 0
    parameters = counted.total - (counted.gate_tables if by_rows else 0)
    elements = min(parameters, MOST_ELEMENTS[buffers.device.type])
    weight_bytes = cfg.train.element_bytes if cfg.train.precision == "bf16" else 0
    halves = fused and cfg.optimizer.store_param_remainders
    weights = cost.weight_update_bytes(weight_bytes, halves=halves)

    def prepare() -> Call:
        make = _on_device if fused else _by_torch
        return make(cfg.optimizer, elements, buffers)

    whole = Case(
        kernel=f"AdamW, {'our kernel' if fused else 'torch, fused'}",
        direction="update",
        count=1 / microbatches,
        cost=cost.update(elements, weights),
        prepare=prepare,
        scale=parameters / elements,
    )
    return [whole, _row_case(cfg, microbatches, distinct, weights, buffers)] if by_rows else [whole]


def _row_case(cfg: RunConfig, microbatches: int, distinct: int, weights: int, buffers: Buffers) -> Case:
    """On a table of twice the rows that are read, for each of which every update has been made."""
    from egmla_megatron.train.adam_rows_cuda import SWEEP

    columns = cfg.model.num_layers * cfg.model.kv_emb_dim
    tokens = cfg.train.micro_batch_size * cfg.train.seq_length * microbatches
    if microbatches > 1:
        distinct = min(cfg.model.vocab_size, round(tokens * unique_fraction(tokens)))
    rows = 2 * distinct
    return Case(
        kernel="AdamW of table rows, our kernels",
        direction="update",
        count=1 / microbatches,
        cost=cost.row_update(distinct * columns, rows // SWEEP * columns, weights),
        prepare=lambda: _by_rows(cfg, rows, columns, buffers),
    )


def _by_rows(cfg: RunConfig, rows: int, columns: int, buffers: Buffers) -> Call:
    from egmla_megatron.train.adam_rows_cuda import Rows, row_squares, update_rows

    weight_VN = buffers.normal(rows, columns)
    gradient_VN = buffers.normal(rows, columns, dtype=torch.float32)
    master_VN = _master(cfg.optimizer, weight_VN)
    tensors = (gradient_VN, weight_VN, torch.zeros_like(gradient_VN), torch.ones_like(gradient_VN), master_VN)
    state, plan_4 = Rows.of(rows, buffers.device), torch.ones(4, device=buffers.device)
    count_1 = torch.ones(1, dtype=torch.int64, device=buffers.device)

    def mark() -> None:
        state.read_V[::2] = 1  # a call leaves none

    def run(_: Any) -> tuple[Tensor, ...]:
        squares_1 = row_squares(state, gradient_VN)
        update_rows(state, tensors, count_1, plan_4, 1, **_settings(cfg.optimizer))
        return (*tensors, squares_1)

    return Call(tensors, run, before=mark)


def _settings(opt: OptimizerConfig) -> dict[str, Any]:
    return {"lr": opt.lr, "betas": (opt.beta1, opt.beta2), "eps": opt.eps, "weight_decay": opt.weight_decay}


def _master(opt: OptimizerConfig, weight: Tensor) -> Tensor:
    """The master weight, or its lower half."""
    return torch.zeros_like(weight, dtype=torch.int16) if opt.store_param_remainders else weight.float()


def _on_device(opt: OptimizerConfig, elements: int, buffers: Buffers) -> Call:
    from egmla_megatron.train.adam_cuda import adam_tables, adamw

    weight = buffers.normal(elements)
    gradient, master = buffers.normal(elements, dtype=torch.float32), _master(opt, weight)
    moments = (gradient.clone(), gradient.square())
    (table,) = adam_tables([(gradient, weight, *moments, master)])
    plan_4 = torch.tensor([1.0, 1.0, 1.0, 1.0], device=buffers.device)

    def run(_: Any) -> tuple[Tensor, ...]:
        adamw(table, plan_4, **_settings(opt))
        return (*moments, master, weight)

    return Call((gradient, *moments, master), run)


def _by_torch(opt: OptimizerConfig, elements: int, buffers: Buffers) -> Call:
    """And the model's weights copied from the master weights, unless they are the same."""
    master = Parameter(buffers.normal(elements, dtype=torch.float32))
    master.grad = buffers.normal(elements, dtype=torch.float32)
    weight = None if buffers.dtype == torch.float32 else buffers.normal(elements)
    capturable = buffers.device.type == "cuda"  # counts its steps on the device
    optimizer = torch.optim.AdamW([master], **_settings(opt), fused=True, capturable=capturable)
    optimizer.step()  # makes moments
    states = (master.detach(), *(optimizer.state[master][name] for name in ("exp_avg", "exp_avg_sq")))

    def run(_: Any) -> tuple[Tensor, ...]:
        optimizer.step()
        return states if weight is None else (*states, weight.copy_(states[0]))

    return Call((master.grad, *states), run)
