"""What can be known of a resume before anything is built: whether the data order stays, whether anything is left."""

from __future__ import annotations

from pathlib import Path

from egmla_megatron.checkpoint.manifest import Manifest, read_manifest
from egmla_megatron.config.load import from_dict
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.data.blend import parse_blend
from egmla_megatron.errors import UserError
from egmla_megatron.report.read import evaluation_at

__all__ = ["check_same_order", "nothing_to_train"]


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


def nothing_to_train(cfg: RunConfig, checkpoint: Path | None) -> str:
    """Why a start from this checkpoint has nothing to do, as a line for the user; empty: it has.

    A run that was stopped behind its last step, before its last evaluation, still has that to do.
    """
    done = read_manifest(checkpoint).step if checkpoint is not None else 0
    total = cfg.total_steps
    if done < total:
        return ""
    evaluated = evaluation_at(cfg.run.dir, done) if cfg.data.valid else None
    if done == total and cfg.data.valid and (evaluated is None or evaluated["step"] != done):
        return ""
    asked = "all of them" if done == total else f"more than the {total} asked for"
    length = "train.steps" if cfg.train.steps else "train.tokens"
    return f"complete step {done}: {asked}, nothing is left to train; to go on from {checkpoint}, raise {length}"


def _refuse_change(name: str, before: object, now: object, path: Path) -> None:
    if before != now:
        raise UserError(
            f"{name}: got {now}, but {path} was trained with {before} and would go on with other data or in another "
            f"order; keep {before}, or start a new run.dir"
        )
