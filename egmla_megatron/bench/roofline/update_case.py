"""The optimizer's update of all weights, timed on a part of them."""

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

__all__ = ["update_case"]

MOST_ELEMENTS = {"cuda": 2**27, "cpu": 2**20}  # of the buffer that is updated; larger ones take proportionally longer


def update_case(cfg: RunConfig, microbatches: int, buffers: Buffers) -> Case:
    """AdamW of fp32 gradients, moments and master weights over all of the model's parameters, gating tables included.

    Args:
        microbatches: of an optimizer step.
    """
    parameters = count_parameters(cfg.model).total
    elements = min(parameters, MOST_ELEMENTS[buffers.device.type])
    weight_bytes = cfg.train.element_bytes if cfg.train.precision == "bf16" else 0
    fused = optimizer_config(cfg).use_precision_aware_optimizer  # as the trainer's, where it can

    def prepare() -> Call:
        make = _on_device if fused else _by_torch
        return make(cfg.optimizer, elements, buffers)

    return Case(
        kernel=f"AdamW, {'our kernel' if fused else 'torch, fused'}",
        direction="update",
        count=1 / microbatches,
        cost=cost.update(elements, weight_bytes),
        prepare=prepare,
        scale=parameters / elements,
    )


def _settings(opt: OptimizerConfig) -> dict[str, Any]:
    return {"lr": opt.lr, "betas": (opt.beta1, opt.beta2), "eps": opt.eps, "weight_decay": opt.weight_decay}


def _on_device(opt: OptimizerConfig, elements: int, buffers: Buffers) -> Call:
    from egmla_megatron.train.adam_cuda import adam_tables, adamw

    weight = buffers.normal(elements)
    gradient, master = (buffers.normal(elements, dtype=torch.float32) for _ in range(2))
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
