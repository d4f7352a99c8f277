"""DDP wrapping, AdamW and the learning-rate schedule, all megatron-core's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import ParamKey, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamPredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from egmla_megatron.attention.gated_kv_up import GatedKVUp
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.config.to_mcore import ddp_config, fused_master_weights, optimizer_config
from egmla_megatron.model.build import BuiltModel
from egmla_megatron.parallel.world import World
from egmla_megatron.train.data_parallel import DataParallel
from egmla_megatron.train.deferred_rows import defer_rows
from egmla_megatron.train.device_adam import single_optimizers, use_device_adam

__all__ = [
    "adopt_hyperparameters",
    "build_optimizer",
    "build_schedule",
    "gather_weights",
    "loading_states",
    "wrap_ddp",
]

STYLES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "wsd": "WSD"}


def wrap_ddp(cfg: RunConfig, built: BuiltModel, world: World) -> list[Any]:
    """Every chunk of the model in megatron-core's DDP, and the schedule's hooks in the transformer config."""
    settings = ddp_config(cfg, average=_can_average(built.config, world))
    model = [
        # as megatron-core's trainer does: only the first chunk's gradients, the last to come, are worth cutting up
        DataParallel(
            built.config, settings, chunk, index > 0, pg_collection=world.groups, written=_written_weights(cfg, chunk)
        )
        for index, chunk in enumerate(built.wrapped)
    ]

    @contextmanager
    def no_sync() -> Iterator[None]:
        with ExitStack() as stack:
            for chunk in model:
                stack.enter_context(chunk.no_sync())
            yield

    if cfg.parallel.overlap_grad_reduce:
        built.config.no_sync_func = no_sync
    built.config.finalize_model_grads_func = finalize_model_grads
    return model


def _can_average(config: Any, world: World) -> bool:
    """Whether collectives can divide: gloo's cannot, and where masks make micro-batches unequal something else divides.
    A mean over one rank is a pass over all gradients (NCCL multiplies before it sums), a sum is none. megatron-core
    asserts that the ranks' factors multiply to 1 / ranks, which rounding can prevent."""
    dense, tables = world.groups.dp_cp.size(), world.groups.expt_dp.size()
    exact = (tables / dense) / tables == 1 / dense
    return world.device.type == "cuda" and not config.calculate_per_token_loss and dense > 1 and exact


def _written_weights(cfg: RunConfig, chunk: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Weights whose gradients their layers add to the main gradients, once in every micro-batch. With
    recomputation a layer's forward, which says whether to add, is that of another time."""
    if cfg.train.recompute != "none":
        return []
    found = []
    for each in chunk.modules():
        if isinstance(each, GatedKVUp) and each.config.fused_grad_accumulation:
            found.append(each.gate_proj_weight)
        elif getattr(each, "fuse_wgrad_accumulation", False):  # Transformer Engine's name; megatron-core has none
            found.append(each.weight)  # type: ignore[arg-type]
    return [weight for weight in found if weight.requires_grad]


def _is_vector(parameter: torch.nn.Parameter) -> bool:
    return parameter.dim() == 1


def _param_overrides(cfg: RunConfig) -> dict[ParamKey, Any]:
    """No weight decay on norms, biases and gating tables (a rare token's row would only ever shrink)."""
    opt = cfg.optimizer
    table = {
        "wd_mult": 0.0,
        "max_lr": opt.lr * opt.gate_table_lr_ratio,
        "min_lr": opt.lr * opt.min_lr_ratio * opt.gate_table_lr_ratio,
    }
    vectors = ParamKey(predicate=ParamPredicate(name="norms and biases", fn=_is_vector))
    return {vectors: {"wd_mult": 0.0}, ParamKey(name="*gate_table.weight"): table}


def build_optimizer(cfg: RunConfig, model: list[Any], built: BuiltModel) -> Any:
    """One AdamW over all chunks; sharded states when `optimizer.distributed`; tables go with the expert buffers."""
    optimizer = get_megatron_optimizer(optimizer_config(cfg), model, config_overrides=_param_overrides(cfg))
    if fused_master_weights(cfg):
        betas, device = (cfg.optimizer.beta1, cfg.optimizer.beta2), next(model[0].parameters()).device
        use_device_adam(optimizer, betas, device, remainders=cfg.optimizer.store_param_remainders)
        if cfg.optimizer.deferred_table_updates:
            defer_rows(optimizer, model)
    built.config.grad_scale_func = optimizer.scale_loss
    return optimizer


def build_schedule(cfg: RunConfig, optimizer: Any, step: int) -> OptimizerParamScheduler:
    """Schedule positioned so that the next optimizer step is number `step` (from 0).

    A pure function of the step number, so a resume needs no state of it.
    """
    opt, total = cfg.optimizer, cfg.total_steps
    decay_end = total if opt.schedule == "wsd" else opt.decay_steps or total
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=opt.lr,
        min_lr=opt.lr * opt.min_lr_ratio,
        lr_warmup_steps=opt.warmup_steps,
        lr_decay_steps=max(decay_end, opt.warmup_steps + 1),
        lr_decay_style=STYLES[opt.schedule],
        start_wd=opt.weight_decay,
        end_wd=opt.weight_decay,
        wd_incr_steps=total,
        wd_incr_style="constant",
        wsd_decay_steps=opt.decay_steps or max(1, total // 5),
        lr_wsd_decay_style="linear",
    )
    schedule.step(step + 1)  # the first step already learns: lr/warmup, not 0
    return schedule


def _inner_torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [each.optimizer for each in chained if isinstance(each.optimizer, torch.optim.AdamW | torch.optim.Adam)]


@contextmanager
def _prepared(inner: list[torch.optim.Optimizer]) -> Iterator[None]:
    steps: dict[int, torch.Tensor] = {}
    for each in inner:
        for group in each.param_groups:
            for p in group["params"]:
                each.state[p] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }

    def set_step_aside(each: torch.optim.Optimizer) -> None:
        for state in each.state.values():
            if "step" in state:
                steps[id(each)] = state.pop("step")

    hooks = [each.register_load_state_dict_post_hook(set_step_aside) for each in inner]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for each in inner:
            for state in each.state.values():
                if id(each) in steps:
                    state["step"] = steps[id(each)].clone()


def loading_states(cfg: RunConfig, optimizer: Any) -> AbstractContextManager[None]:
    """Context for loading optimizer states into a fresh optimizer.

    megatron-core 0.19.2's distributed optimizer over torch's AdamW cannot load: it reads `step` from states
    that torch only makes in its first step (assertion `len(steps) == 1`), then wants every state tensor from
    the checkpoint, where `step` is not (KeyError). The states are made beforehand and `step` is kept aside
    while megatron-core copies tensors; all through torch's public API. Transformer Engine's and apex's
    FusedAdam keep `step` in the parameter group and need nothing.
    """
    return _prepared(_inner_torch_optimizers(optimizer) if cfg.optimizer.distributed else [])


def gather_weights(cfg: RunConfig, optimizer: Any) -> None:
    """After master weights were loaded: a rank's share of the weights may be they (fp32) or follow from them (lower
    halves), and differ from the rounded weights that others loaded. Every rank calls it."""
    if not cfg.optimizer.distributed or cfg.parallel.overlap_param_gather:
        return  # the next forward pass gathers, where that overlaps
    for chunk in {id(chunk): chunk for each in single_optimizers(optimizer) for chunk in each.model_chunks}.values():
        chunk.start_param_sync()


def _loaded_groups(state: Any) -> Iterator[dict[str, Any]]:
    """Parameter groups in a loaded optimizer state, however many optimizers are chained in it."""
    if isinstance(state, dict):
        yield from state.get("param_groups", ())
        for value in state.values():
            yield from _loaded_groups(value)


def _role(group: dict[str, Any]) -> tuple[Any, Any]:
    """What tells our parameter groups apart: weights, norms and biases, gating tables."""
    return group.get("wd_mult"), group.get("is_expert_parallel")


def adopt_hyperparameters(loaded: Any, optimizer: Any) -> None:
    """Give the groups of a loaded optimizer state, in place, this run's hyper-parameters; only `step` stays.

    megatron-core finds the group of a checkpoint by its learning rates, so a resume with another optimizer.lr
    would end in a ValueError, and betas would silently stay those of the checkpoint.
    """
    current = {_role(group): group for group in optimizer.param_groups}
    for group in _loaded_groups(loaded):
        mine = current.get(_role(group), {})
        group.update({key: value for key, value in mine.items() if key not in ("params", "step")})
