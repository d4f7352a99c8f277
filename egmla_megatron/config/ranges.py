"""Limits of single values, as one table: a value outside has no meaning in any combination."""

from __future__ import annotations

import math

from egmla_megatron.config.schema import RunConfig
from egmla_megatron.config.workable import refuse

__all__ = ["check_ranges"]

_POSITIVE_INTEGERS = (
    "train.seq_length",
    "train.micro_batch_size",
    "train.global_batch_size",
    "train.tokens",
    "train.eval_batches",
    "train.max_bad_steps",
    "parallel.tensor",
    "parallel.pipeline",
    "parallel.context",
    "parallel.virtual_pipeline",
    "parallel.gate_group",
    "logging.interval_steps",
)
_NOT_NEGATIVE = (
    "run.seed",
    "data.num_workers",
    "train.steps",
    "train.eval_interval",
    "train.exit_after_steps",
    "train.peer_timeout_s",
    "optimizer.warmup_steps",
    "optimizer.decay_steps",
    "optimizer.weight_decay",
    "optimizer.clip_grad",
    "optimizer.gate_table_lr_ratio",
    "checkpoint.interval_steps",
    "checkpoint.interval_minutes",
    "checkpoint.keep",
    "checkpoint.keep_every_steps",
    "logging.warmup_steps",
)
_POSITIVE = (
    "train.collective_timeout_s",
    "optimizer.lr",
    "optimizer.eps",
    "model.rope_theta",
    "model.rms_norm_eps",
    "model.gate_norm_eps",
    "model.init_std",
    "model.gate_table_init_std",
)
_BELOW_ONE = ("optimizer.beta1", "optimizer.beta2", "model.attention_dropout", "model.hidden_dropout")
_UP_TO_ONE = ("optimizer.min_lr_ratio",)


def check_ranges(cfg: RunConfig) -> None:
    """Raises UserError for the first value outside its limits."""
    for name in _POSITIVE_INTEGERS:
        _check(cfg, name, _value(cfg, name) >= 1, "at least 1")
    for name in _NOT_NEGATIVE:
        _check(cfg, name, 0 <= _value(cfg, name) < math.inf, "0 or more")
    for name in _POSITIVE:
        _check(cfg, name, 0 < _value(cfg, name) < math.inf, "more than 0")
    for name in _BELOW_ONE:
        _check(cfg, name, 0 <= _value(cfg, name) < 1, "0 to below 1")
    for name in _UP_TO_ONE:
        _check(cfg, name, 0 <= _value(cfg, name) <= 1, "0 to 1")
    _check(cfg, "data.eod_id", cfg.data.eod_id >= -1, "-1 (from the data's manifest) or a token id")


def _value(cfg: RunConfig, name: str) -> float:
    section, key = name.split(".")
    return getattr(getattr(cfg, section), key)


def _check(cfg: RunConfig, name: str, fits: bool, allowed: str) -> None:
    if not fits:
        default = _value(RunConfig(), name)
        refuse(name, _value(cfg, name), allowed, f"the default is {name}={default}")
