"""The folder of a run: whose it is, and what is written there."""

from __future__ import annotations

import os
from pathlib import Path

from egmla_megatron.config.load import architecture, architecture_difference, dump_yaml, load_config
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.errors import UserError

__all__ = ["check_run_dir", "write_config"]


def check_run_dir(cfg: RunConfig) -> None:
    """Refuse a folder that belongs to something else. Reads only, so every rank may call it.

    Raises:
        UserError: the folder is another run's, or not a run folder, or resume=never would overwrite.
    """
    path = Path(cfg.run.dir)
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if existing.is_dir() and not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"run.dir: {existing} cannot be written to; choose another folder")
    if not existing.is_dir():
        raise UserError(f"run.dir: {existing} is a file; choose another folder")
    if not path.exists():
        return
    saved = path / "config.yaml"
    if not saved.is_file():
        if any(path.iterdir()):
            raise UserError(f"run.dir: {path} is not empty and has no config.yaml of a run; choose another folder")
        return
    before = load_config(saved)
    differences = architecture_difference(architecture(before.model), architecture(cfg.model))
    if before.run.name != cfg.run.name:
        differences.insert(0, f"run.name: there {before.run.name!r}, here {cfg.run.name!r}")
    if differences:
        raise UserError(
            f"run.dir: {path} is the folder of another run ({'; '.join(differences[:4])}); choose another run.dir"
        )
    if cfg.checkpoint.resume == "never" and any(path.glob("checkpoints/step_*")):
        raise UserError(f"checkpoint.resume=never: {path} already holds checkpoints; choose another run.dir")


def write_config(cfg: RunConfig) -> None:
    """RUN_DIR/config.yaml: the whole configuration, defaults included. Rank 0 calls it."""
    path = Path(cfg.run.dir)
    try:
        path.mkdir(parents=True, exist_ok=True)
        temporary = path / "config.yaml.tmp"
        temporary.write_text(dump_yaml(cfg))
        temporary.replace(path / "config.yaml")
    except OSError as error:
        raise UserError(f"run.dir: {path} cannot be written to ({error.strerror}); choose another folder") from error
