"""Limits of single values, as one table: a value outside has no meaning in any combination."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

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
_FROM_ONE = (*_POSITIVE_INTEGERS, "train.collective_timeout_s")
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
_YEAR_S = 31_536_000  # the store and the process groups overflow far beyond it
_WIDEST, _MOST_LAYERS = 2**20, 10_000  # far beyond any model that was ever built
# products of a few of the fractional ones must fit into a float of 32 bits
_LARGEST = {
    "run.seed": 2**32 - 1,  # of numpy's RandomState, which shuffles the samples
    "train.tokens": 2**63 - 1,
    "train.peer_timeout_s": _YEAR_S,
    "train.collective_timeout_s": _YEAR_S,
    "data.num_workers": 1024,
    "model.num_layers": _MOST_LAYERS,
    "model.hidden_size": _WIDEST,
    "model.num_attention_heads": _WIDEST,
    "model.intermediate_size": _WIDEST,
    "model.qk_nope_head_dim": _WIDEST,
    "model.qk_rope_head_dim": _WIDEST,
    "model.v_head_dim": _WIDEST,
    "model.q_lora_rank": _WIDEST,
    "model.kv_lora_rank": _WIDEST,
    "model.kv_emb_dim": _WIDEST,
    "model.rope_theta": 10**12,
    "model.rms_norm_eps": 1,
    "model.gate_norm_eps": 1,
    "model.init_std": 1000,
    "model.gate_table_init_std": 1000,
    "optimizer.lr": 1000,
    "optimizer.eps": 1,
    "optimizer.weight_decay": 1000,
    "optimizer.clip_grad": 10**12,  # of gradients that are never clipped, but whose norm is looked at
    "optimizer.gate_table_lr_ratio": 1000,
    "checkpoint.interval_minutes": _YEAR_S // 60,
}


def check_ranges(cfg: RunConfig) -> None:
    """Raises UserError for the first value outside its limits."""
    for name in _FROM_ONE:
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
    shares = cfg.data.unique_fractions
    descending = all(0 < low <= high <= 1 for high, low in pairwise((1.0, *shares)))
    _check(cfg, "data.unique_fractions", descending, "shares above 0 and up to 1, none larger than the one before")
    _check(cfg, "data.eod_id", cfg.data.eod_id >= -1, "-1 (from the data's manifest) or a token id")


def _check_upper_limits(cfg: RunConfig) -> None:
    """Numbers that the libraries below cannot hold would end in their tracebacks, hours later at worst."""
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
