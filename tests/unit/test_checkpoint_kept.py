"""Which checkpoints a run that saves keeps."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from egmla_megatron.checkpoint.manifest import checkpoint_path
from egmla_megatron.checkpoint.save import Saver
from tests.tiny import tiny_run
from tests.unit.test_checkpoint import Run


def test_saving_the_same_step_again_does_nothing_and_old_ones_are_pruned(world: Any, tmp_path: Path) -> None:
    run = Run(world, tiny_run(folder=str(tmp_path), checkpoint={"keep": 2}))
    saved: list[int] = []
    saver = Saver(run.cfg, world, run.built, run.model, run.optimizer, "data", lambda step, path, _: saved.append(step))
    for step in (1, 1, 2, 3):
        saver.save(step)
    assert saved == [1, 2, 3]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_00000002", "step_00000003"]


def test_a_damaged_one_without_a_mark_is_kept_in_place_of_no_whole_one(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from egmla_megatron.checkpoint import save

    def full(path: Path, why: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    run = Run(world, tiny_run(folder=str(tmp_path), checkpoint={"keep": 1}))
    saved: list[int] = []

    def saver(*unmarked: int) -> Saver:
        damaged = {checkpoint_path(tmp_path / "checkpoints", step): "bytes" for step in unmarked}
        parts = (run.built, run.model, run.optimizer, "data")
        return Saver(run.cfg, world, *parts, lambda step, *_: saved.append(step), damaged)

    saver().save(6)
    resumed = saver(6)
    with monkeypatch.context() as patch:
        patch.setattr(save, "mark_damaged", full)
        resumed.save(4)  # which would be deleted: 6 is newer
    assert "nothing is deleted" in capsys.readouterr().err
    resumed.save(5)
    left = sorted((tmp_path / "checkpoints").iterdir())
    assert [path.name for path in left] == ["step_00000005", "step_00000006"]
    assert (left[1] / "DAMAGED").read_text().startswith("bytes")
    again = saver(5)
    again.save(5)  # the run came there again
    assert saved == [6, 4, 5, 5] and again.unmarked == {}
