"""What can be known of the data order before the datasets are built: a resume must go on with the same samples."""

from __future__ import annotations

from pathlib import Path

from egmla_megatron.checkpoint.manifest import Manifest
from egmla_megatron.config.load import from_dict
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.data.blend import parse_blend
from egmla_megatron.errors import UserError

__all__ = ["check_same_order"]


def check_same_order(cfg: RunConfig, path: Path, manifest: Manifest) -> None:
    """The parts of the data fingerprint (data/dataset.py) that a configuration names; the rest needs the datasets.

    Raises:
        UserError: names what changed since the checkpoint `path`.
    """
    if manifest.weights_only:
        return
    before = manifest.config
    _refuse_change("run.seed", before["run"]["seed"], cfg.run.seed, path)
    then, now = ([Path(entry).name for entry in entries] for entries in (before["data"]["train"], cfg.data.train))
    _refuse_change("data.train", then, now, path)
    if before["data"]["eod_id"] >= 0 and cfg.data.eod_id >= 0:
        _refuse_change("data.eod_id", before["data"]["eod_id"], cfg.data.eod_id, path)
    if parse_blend(cfg.data.train, "data.train")[1] is not None:  # weights are drawn for a run of one length
        steps = from_dict(before, str(path)).total_steps
        _refuse_change("train.steps (the data have weights)", steps, cfg.total_steps, path)


def _refuse_change(name: str, before: object, now: object, path: Path) -> None:
    if before != now:
        raise UserError(
            f"{name}: got {now}, but {path} was trained with {before} and would go on with other data or in another "
            f"order; keep {before}, or start a new run.dir"
        )
