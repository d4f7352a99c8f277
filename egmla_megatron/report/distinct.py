"""Where a prediction has its number of distinct ids from: the training data, where they can be read here."""

from __future__ import annotations

from dataclasses import replace

from egmla_megatron.config.schema import RunConfig

__all__ = ["ENGLISH", "with_measured_ids"]

ENGLISH = "as of English in GPT-2's vocabulary"


def with_measured_ids(cfg: RunConfig) -> tuple[RunConfig, str]:
    """(the configuration with `data.unique_fractions`, where they come from); those that are given stay."""
    from egmla_megatron.data.distinct import distinct_shares

    if cfg.data.unique_fractions:
        return cfg, "given by data.unique_fractions"
    if not cfg.data.train:
        return cfg, f"{ENGLISH}: data.train is empty"
    shares = distinct_shares(cfg.data.train, cfg.train.seq_length)
    if not shares:
        return cfg, f"{ENGLISH}: data.train cannot be read here, or is too short"
    return replace(cfg, data=replace(cfg.data, unique_fractions=shares)), "measured in data.train"
