"""Everything that can be checked before torch is imported and any process group starts."""

from __future__ import annotations

import os
from pathlib import Path

from egmla_megatron.checkpoint.choose import check_compatible, choose_checkpoint
from egmla_megatron.checkpoint.manifest import read_manifest
from egmla_megatron.config.check import Layout, check_config
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.data.blend import parse_blend, resolve_eod
from egmla_megatron.data.verify import verify_prefix
from egmla_megatron.errors import UserError
from egmla_megatron.train.run_dir import check_run_dir

__all__ = ["check_everything"]


def check_everything(cfg: RunConfig, world_size: int) -> tuple[Layout, Path | None]:
    """Configuration, run folder, data and checkpoint, before any process group starts.

    Returns:
        The layout, and the checkpoint to start from.

    Raises:
        UserError: names the first thing that would not work.
    """
    layout = check_config(cfg, world_size)
    check_run_dir(cfg)
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        _check_data(cfg)
    checkpoint = choose_checkpoint(cfg)
    if checkpoint is not None:
        check_compatible(cfg, checkpoint, read_manifest(checkpoint), None)
    return layout, checkpoint


def _check_data(cfg: RunConfig) -> None:
    """Once per node: headers, sizes and ids of every dataset, as far as is cheap."""
    if not cfg.data.train:
        raise UserError(
            "data.train: got nothing, give prefixes of indexed datasets (data.train=[data/mine] for data/mine.bin and "
            ".idx); egmla_megatron.data.indexed.write_texts makes them from text"
        )
    for key, entries in (("data.train", cfg.data.train), ("data.valid", cfg.data.valid)):
        for prefix in parse_blend(entries, key)[0]:
            verify_prefix(prefix, vocab_size=cfg.model.vocab_size)
    eod = resolve_eod(cfg)
    if eod >= cfg.model.vocab_size:
        raise UserError(f"data.eod_id: got {eod}, allowed 0..{cfg.model.vocab_size - 1} (model.vocab_size)")
