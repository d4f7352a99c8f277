"""What a start does about checkpoints that cannot be used: it names them, and never begins anew over its own."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from egmla_megatron.checkpoint import manifest
from egmla_megatron.checkpoint.choose import choose_checkpoint, left_out, warn_of_damaged
from egmla_megatron.checkpoint.manifest import checkpoint_path, damage_of, find_checkpoint, mark_damaged
from egmla_megatron.checkpoint.prune import prune
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.errors import UserError
from tests.tiny import tiny_run
from tests.unit.test_checkpoint_manifest import save


def run_with(folder: Path, *steps: int, **checkpoint: str) -> RunConfig:
    for step in steps:
        save(folder / "run/checkpoints", step)
    return tiny_run(folder=str(folder / "run"), checkpoint=checkpoint)


def cut(path: Path) -> None:
    """Five bytes less of a checkpoint's data file."""
    os.truncate(path / "data", (path / "data").stat().st_size - 5)


def path_of(cfg: RunConfig, step: int) -> Path:
    return checkpoint_path(Path(cfg.run.dir) / "checkpoints", step)


def test_a_damaged_newest_one_is_named_and_the_older_one_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = run_with(tmp_path, 2, 4, 6, 8)
    cut(path_of(cfg, 8))
    (path_of(cfg, 6) / "COMPLETE").write_bytes(b"\xff\xfe")
    cut(path_of(cfg, 2))  # older than the one that is used: nothing is lost by it
    assert choose_checkpoint(cfg) == path_of(cfg, 4)
    assert capsys.readouterr().err == ""  # every rank chooses, one speaks
    warn_of_damaged(cfg)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "step_00000006 is damaged and passed over (manifest.json is not the one" in lines[0]
    assert "step_00000008 is damaged and passed over (data has 13 bytes of 18)" in lines[1]


def test_other_tools_name_it_too_but_one_rank_of_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = run_with(tmp_path, 2, 4)
    cut(path_of(cfg, 4))
    assert find_checkpoint(Path(cfg.run.dir)) == path_of(cfg, 2)
    assert "step_00000004 is damaged" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    find_checkpoint(Path(cfg.run.dir))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("resume", ["auto", "required"])
def test_no_start_from_the_beginning_over_damaged_ones(tmp_path: Path, resume: str) -> None:
    cfg = run_with(tmp_path, 2, 4, resume=resume)
    cut(path_of(cfg, 2))
    (path_of(cfg, 4) / "data").unlink()
    with pytest.raises(UserError, match=r"all 2 checkpoints in .*step_00000004: data is missing.*move .* away"):
        choose_checkpoint(cfg)


def test_nor_from_another_run_s_checkpoint(tmp_path: Path) -> None:
    other = save(tmp_path / "other/checkpoints", 3)
    cfg = run_with(tmp_path, 2, load=str(other))
    cut(path_of(cfg, 2))
    with pytest.raises(UserError, match=r"step_00000002 is damaged \(data has 13 bytes of 18\).*start from .*other"):
        choose_checkpoint(cfg)
    Path(cfg.run.dir, "checkpoints").rename(tmp_path / "away")
    assert choose_checkpoint(cfg) == other


def test_a_damaged_one_to_load_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older, newer = (save(tmp_path / "other/checkpoints", step) for step in (3, 5))
    cfg = run_with(tmp_path, load=str(tmp_path / "other"))
    cut(newer)
    assert choose_checkpoint(cfg) == older
    warn_of_damaged(cfg)
    assert "step_00000005 is damaged" in capsys.readouterr().err
    cut(older)
    with pytest.raises(UserError, match=r"all 2 checkpoints in .* are damaged"):
        choose_checkpoint(cfg)
    cfg = tiny_run(folder=cfg.run.dir, checkpoint={"load": str(newer)})
    with pytest.raises(UserError, match=r"step_00000005 is damaged \(data has"):
        choose_checkpoint(cfg)


def test_a_marked_one_is_passed_over_and_outlives_no_whole_one(tmp_path: Path) -> None:
    """The marked newest must not count among those that are kept: the whole one before it would be deleted."""
    cfg = run_with(tmp_path, 2, 4, 6)
    mark_damaged(path_of(cfg, 6), "data: 1 files with 1 pieces that are not as they were written")
    assert choose_checkpoint(cfg) == path_of(cfg, 4)
    (line,) = left_out(cfg)
    assert line.startswith("step_00000006: data: 1 files with 1 pieces") and "putting back a copy" in line
    save(Path(cfg.run.dir) / "checkpoints", 5)
    assert prune(Path(cfg.run.dir) / "checkpoints", 1, 0) == [path_of(cfg, 2), path_of(cfg, 4)]
    assert choose_checkpoint(cfg) == path_of(cfg, 5)
    save(Path(cfg.run.dir) / "checkpoints", 6)  # the run came there again
    assert choose_checkpoint(cfg) == path_of(cfg, 6) and left_out(cfg) == []


def test_every_checkpoint_is_examined_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = run_with(tmp_path, 2, 4, 6, 8)
    for step in (2, 6, 8):
        cut(path_of(cfg, step))
    examined: list[Path] = []

    def look(path: Path) -> str:
        examined.append(path)
        return damage_of(path)

    monkeypatch.setattr(manifest, "damage_of", look)
    assert [line.split(":")[0] for line in left_out(cfg)] == ["step_00000006", "step_00000008"]
    assert sorted(examined) == [path_of(cfg, step) for step in (2, 4, 6, 8)]


def test_the_first_rank_alone_examines_them_for_the_line_of_the_start(tmp_path: Path) -> None:
    from egmla_megatron.train.expected import passed_over

    cfg = run_with(tmp_path, 2, 4)
    cut(path_of(cfg, 4))
    first, other = (
        SimpleNamespace(cfg=cfg, unmarked={}, world=SimpleNamespace(is_first=is_first)) for is_first in (True, False)
    )
    assert len(passed_over(cast(Any, first))) == 1 and passed_over(cast(Any, other)) == []


def test_a_full_disk_leaves_no_half_a_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, 2)
    before = sorted(path.iterdir())

    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left"):
        mark_damaged(path, "bytes")
    assert sorted(path.iterdir()) == before and damage_of(path) == ""


def test_one_that_could_not_be_marked_is_passed_over(tmp_path: Path) -> None:
    cfg = run_with(tmp_path, 2, 4)
    unmarked = {path_of(cfg, 4): "bytes"}
    assert choose_checkpoint(cfg, unmarked) == path_of(cfg, 2)
    assert left_out(cfg, unmarked) == ["step_00000004: bytes"]
    with pytest.raises(UserError, match=r"all 2 checkpoints in .*step_00000004: bytes"):
        choose_checkpoint(cfg, unmarked | {path_of(cfg, 2): "bytes, too"})


@pytest.mark.parametrize(
    ("keep", "every", "left"),
    [
        (2, 0, [8, 10]),
        (3, 0, [6, 8, 10]),
        (4, 0, [2, 4, 6, 8, 10]),
        (0, 0, [2, 4, 6, 8, 10]),
        (2, 4, [4, 8, 10]),
    ],
)
def test_a_marked_one_goes_when_enough_whole_ones_are_newer(
    tmp_path: Path, keep: int, every: int, left: list[int]
) -> None:
    for step in (2, 4, 6, 8, 10):
        save(tmp_path, step)
    mark_damaged(checkpoint_path(tmp_path, 4), "bytes")
    prune(tmp_path, keep, every)
    assert sorted(tmp_path.iterdir()) == [checkpoint_path(tmp_path, step) for step in left]


def test_a_save_that_was_cut_off_is_no_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = run_with(tmp_path)
    (Path(cfg.run.dir) / "checkpoints/step_00000002.incomplete").mkdir(parents=True)
    assert choose_checkpoint(cfg) is None
    warn_of_damaged(cfg)
    assert capsys.readouterr().err == ""


def test_what_cannot_be_read_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, 2)

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert damage_of(path) == f"{path / 'manifest.json'} cannot be read (Permission denied)"
