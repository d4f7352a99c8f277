"""Which checkpoints of a run are deleted, and in which order, so that a crash in between does no harm."""

from __future__ import annotations

import shutil
from pathlib import Path

from egmla_megatron.checkpoint.manifest import DAMAGED, MARKER, complete_checkpoints, step_of

__all__ = ["prune"]


def prune(root: Path, keep: int, keep_every_steps: int) -> list[Path]:
    """Delete all but the newest `keep` complete checkpoints (0: delete none) and those at multiples of
    `keep_every_steps`; also those marked as damaged that have `keep` complete newer ones, and left-overs of interrupted
    saves and deletions older than the newest. Returns what went, but for left-overs."""
    complete = complete_checkpoints(root)
    old = complete[:-keep] if keep else []
    if keep and len(complete) >= keep:
        old += [path for path in _marked(root) if step_of(path) < step_of(complete[-keep])]
    gone = [path for path in old if not (keep_every_steps and step_of(path) % keep_every_steps == 0)]
    for path in gone:
        (path / MARKER).unlink(missing_ok=True)  # first, so that a half-deleted folder is never taken for whole
        shutil.rmtree(path)
    for path in root.glob("step_*"):
        unfinished = path.suffix == ".incomplete"  # a save that a crash interrupted
        half_deleted = step_of(path) >= 0 and not (path / MARKER).exists()
        if complete and (unfinished or half_deleted) and step_of(path.with_suffix("")) < step_of(complete[-1]):
            shutil.rmtree(path)
    return gone


def _marked(root: Path) -> list[Path]:
    return [path for path in root.glob("step_*") if step_of(path) >= 0 and (path / DAMAGED).is_file()]
