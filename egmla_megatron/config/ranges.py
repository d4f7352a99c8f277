"""Limits of single values, as one table: a value outside has no meaning in any combination."""

from __future__ import annotations

import dataclasses
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
    "parallel.grad_bucket_params",
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
_INT32 = 2**31 - 1  # megatron-core counts sizes, epochs and documents in 32 bits
_LARGEST = {
    "run.seed": 2**32 - 1,  # of numpy's RandomState, which shuffles the samples
    "train.tokens": 2**63 - 1,
    "train.peer_timeout_s": 31_536_000,  # a year; the store and the process groups overflow far beyond it
    "train.collective_timeout_s": 31_536_000,
}


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
    _check_upper_limits(cfg)
    _check(cfg, "data.eod_id", cfg.data.eod_id >= -1, "-1 (from the data's manifest) or a token id")


def _check_upper_limits(cfg: RunConfig) -> None:
    """Whole numbers that the libraries below cannot hold would end in their tracebacks, hours later at worst."""
    for section in dataclasses.fields(cfg):
        for field in dataclasses.fields(getattr(cfg, section.name)):
            name = f"{section.name}.{field.name}"
            value = getattr(getattr(cfg, section.name), field.name)
            if name in _LARGEST or (isinstance(value, int) and not isinstance(value, bool)):
                largest = _LARGEST.get(name, _INT32)
                _check(cfg, name, value <= largest, f"at most {largest}")
    if cfg.total_steps > _INT32:
        refuse(
            "train.tokens gives more optimizer steps than can be counted",
            f"{cfg.total_steps} steps",
            f"at most {_INT32}",
            "lower train.tokens, or raise train.global_batch_size",
        )


def _value(cfg: RunConfig, name: str) -> float:
    section, key = name.split(".")
    return getattr(getattr(cfg, section), key)


def _check(cfg: RunConfig, name: str, fits: bool, allowed: str) -> None:
    if not fits:
        default = _value(RunConfig(), name)
        refuse(name, _value(cfg, name), allowed, f"the default is {name}={default}")
