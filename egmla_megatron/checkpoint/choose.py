"""Which checkpoint a run starts from, and whether it may; without torch, so that it can be checked in a moment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from egmla_megatron.checkpoint.manifest import (
    NONE,
    Manifest,
    complete_checkpoints,
    damaged_checkpoints,
    describe_damaged,
    find_checkpoint,
    passed_over,
    warn_of_passed_over,
)
from egmla_megatron.config.load import architecture, architecture_difference
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.errors import UserError

__all__ = [
    "check_compatible",
    "choose_checkpoint",
    "left_out",
    "own_checkpoints",
    "warn_of_damaged",
    "where_it_resumes",
]


def own_checkpoints(cfg: RunConfig) -> Path:
    """The folder of the run's checkpoints."""
    return Path(cfg.run.dir) / "checkpoints"


def warn_of_damaged(cfg: RunConfig) -> None:
    """Name the checkpoints that `choose_checkpoint` passes over, on stderr."""
    if cfg.checkpoint.resume != "never" and complete_checkpoints(own_checkpoints(cfg)):
        warn_of_passed_over(own_checkpoints(cfg))
    elif cfg.checkpoint.load:
        find_checkpoint(Path(cfg.checkpoint.load))


def left_out(cfg: RunConfig, unmarked: Mapping[Path, str] = NONE) -> list[str]:
    """Names of the run's own checkpoints that `choose_checkpoint` passes over, with the reasons, oldest first."""
    if cfg.checkpoint.resume == "never":
        return []
    return [f"{path.name}: {why}" for path, why in passed_over(own_checkpoints(cfg), unmarked).items()]


def choose_checkpoint(cfg: RunConfig, unmarked: Mapping[Path, str] = NONE) -> Path | None:
    """The checkpoint to start from, or None for a fresh start. Silent: see `warn_of_damaged`.

    Args:
        unmarked: those of the run whose bytes changed, with the reason, but which could not be marked.

    Raises:
        UserError: a checkpoint is required and there is none, or all of the run's are damaged: a start from the
            beginning would overwrite what may still be mended.
    """
    root = own_checkpoints(cfg)
    own = complete_checkpoints(root, unmarked)
    if cfg.checkpoint.resume != "never":
        if own:
            return own[-1]
        damaged = damaged_checkpoints(root, unmarked)
        if damaged:
            raise UserError(
                f"checkpoint: {describe_damaged(damaged)}, allowed one that is whole; put back a copy, or move {root} "
                f"away to start from {cfg.checkpoint.load or 'the beginning'}, or choose another run.dir"
            )
    if cfg.checkpoint.load:
        return find_checkpoint(Path(cfg.checkpoint.load), warn=False)
    if cfg.checkpoint.resume == "required":
        raise UserError(
            f"checkpoint.resume=required: {root} holds no complete checkpoint; use auto to start from the beginning"
        )
    return None


def where_it_resumes(cfg: RunConfig) -> str:
    """For a message: what the next start goes on from."""
    own = complete_checkpoints(own_checkpoints(cfg))
    if own and cfg.checkpoint.resume != "never":
        return f"it goes on from {own[-1].name}"
    return f"it begins anew from {cfg.checkpoint.load or 'the beginning'}, there is no checkpoint of this run"


def check_compatible(cfg: RunConfig, path: Path, manifest: Manifest, data_fingerprint: str | None) -> None:
    """Refuse a checkpoint that this configuration would continue wrongly.

    Args:
        data_fingerprint: of the datasets that were built; None: not built yet.

    Raises:
        UserError: names what differs.
    """
    differences = architecture_difference(manifest.architecture, architecture(cfg.model))
    if differences:
        raise UserError(
            f"checkpoint: {path} is of another architecture ({'; '.join(differences[:4])}); use its configuration, "
            "or another run.dir to start anew"
        )
    if manifest.weights_only:
        return
    if manifest.distributed_optimizer != cfg.optimizer.distributed:
        raise UserError(
            f"optimizer.distributed: {path} was saved with {manifest.distributed_optimizer}, the configuration says "
            f"{cfg.optimizer.distributed}; set optimizer.distributed={str(manifest.distributed_optimizer).lower()}"
        )
    before = manifest.config["train"]
    if before["precision"] != cfg.train.precision and not cfg.optimizer.distributed:
        raise UserError(
            f"train.precision: {path} was saved with {before['precision']} and optimizer.distributed=false, the "
            f"configuration says {cfg.train.precision}; set train.precision={before['precision']} (states of the "
            "distributed optimizer alone go on in either)"
        )
    batch = (before["global_batch_size"], before["seq_length"])
    if batch != (cfg.train.global_batch_size, cfg.train.seq_length):
        raise UserError(
            f"train: {path} was trained with global_batch_size, seq_length = {batch}, got "
            f"{(cfg.train.global_batch_size, cfg.train.seq_length)}; the data position would be lost: keep them"
        )
    if data_fingerprint is not None and data_fingerprint != manifest.data_fingerprint:
        raise UserError(
            f"data: {path} was trained on other data or in another order (fingerprint {manifest.data_fingerprint}, "
            f"now {data_fingerprint}); keep data.train, run.seed and train.seq_length (with weighted data also "
            "train.steps), or start a new run.dir"
        )
