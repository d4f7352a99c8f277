"""Which checkpoint folders count as whole, which is the newest, and which are deleted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from egmla_megatron.checkpoint.manifest import (
    Manifest,
    checkpoint_path,
    complete_checkpoints,
    find_checkpoint,
    is_complete,
    mark_complete,
    read_manifest,
    step_of,
)
from egmla_megatron.checkpoint.prune import prune
from egmla_megatron.errors import UserError


def manifest(step: int) -> Manifest:
    return Manifest(
        format=1,
        step=step,
        consumed_samples=4 * step,
        consumed_tokens=64 * step,
        architecture={"hidden_size": 8},
        config={},
        layout={"world_size": 2},
        data_fingerprint="abc",
        distributed_optimizer=True,
        implementation="torch",
        versions={},
        written_unix_s=1.0,
    )


def save(root: Path, step: int) -> Path:
    """A complete checkpoint with one data file."""
    final = checkpoint_path(root, step)
    temporary = final.with_name(final.name + ".incomplete")
    temporary.mkdir(parents=True)
    (temporary / "data").write_text(f"written for step {step}")
    mark_complete(temporary, final, manifest(step))
    assert not temporary.exists()
    return final


def steps(root: Path) -> list[int]:
    return [step_of(path) for path in complete_checkpoints(root)]


def test_round_trip(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    assert path.name == "step_00000005"
    assert is_complete(path)
    assert read_manifest(path) == replace(manifest(5), files={"data": len("written for step 5")})


def test_a_checkpoint_written_again_replaces_the_old_one(tmp_path: Path) -> None:
    (save(tmp_path, 5) / "left_over").write_text("")
    assert sorted(file.name for file in save(tmp_path, 5).iterdir()) == ["COMPLETE", "data", "manifest.json"]


def test_steps_sort_as_numbers_beyond_eight_digits(tmp_path: Path) -> None:
    for step in (100_000_000, 99_999_999, 2):
        save(tmp_path, step)
    assert steps(tmp_path) == [2, 99_999_999, 100_000_000]
    assert find_checkpoint(tmp_path) == checkpoint_path(tmp_path, 100_000_000)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no_marker": lambda path: (path / "COMPLETE").unlink(),
    "empty_marker": lambda path: (path / "COMPLETE").write_text(""),
    "no_manifest": lambda path: (path / "manifest.json").unlink(),
    "truncated_manifest": lambda path: (path / "manifest.json").write_text("{"),
    "changed_manifest": lambda path: (path / "manifest.json").write_text(json.dumps(asdict(manifest(6)))),
    "truncated_data": lambda path: (path / "data").write_text("written for"),
    "missing_data": lambda path: (path / "data").unlink(),
    "temporary_name": lambda path: path.rename(path.with_name(path.name + ".incomplete")),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_half_written_checkpoint_is_passed_over(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    save(tmp_path, 3)
    newest = save(tmp_path, 9)
    assert steps(tmp_path) == [3, 9]
    damage(newest)
    assert steps(tmp_path) == [3]
    assert find_checkpoint(tmp_path) == checkpoint_path(tmp_path, 3)
    with pytest.raises(UserError, match=r"not complete"):
        read_manifest(newest)


def test_finding(tmp_path: Path) -> None:
    path = save(tmp_path / "run/checkpoints", 3)
    assert find_checkpoint(path) == find_checkpoint(path.parent) == find_checkpoint(tmp_path / "run") == path
    with pytest.raises(UserError, match="does not exist"):
        find_checkpoint(tmp_path / "nothing")
    with pytest.raises(UserError, match="holds no complete checkpoint"):
        find_checkpoint(tmp_path)


def test_a_manifest_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    temporary = tmp_path / "new"
    temporary.mkdir()
    newer = Manifest(**{**asdict(manifest(1)), "format": 2})
    mark_complete(temporary, checkpoint_path(tmp_path, 1), newer)
    with pytest.raises(UserError, match="format 2, this version reads 1; update"):
        read_manifest(checkpoint_path(tmp_path, 1))


@pytest.mark.parametrize(
    ("keep", "every", "left"),
    [
        (0, 0, [2, 4, 6, 8, 10]),
        (1, 0, [10]),
        (3, 0, [6, 8, 10]),
        (9, 0, [2, 4, 6, 8, 10]),
        (1, 4, [4, 8, 10]),
        (2, 5, [8, 10]),
    ],
)
def test_pruning(tmp_path: Path, keep: int, every: int, left: list[int]) -> None:
    for step in (2, 4, 6, 8, 10):
        save(tmp_path, step)
    gone = [step_of(path) for path in prune(tmp_path, keep, every)]
    assert steps(tmp_path) == left
    assert sorted(gone + left) == [2, 4, 6, 8, 10]


def test_pruning_leaves_what_is_no_checkpoint_and_ends_a_deletion_that_was_cut_short(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        save(tmp_path, step)
    for step in (2, 6):  # a deletion that was cut short, and something newer that is not whole
        (checkpoint_path(tmp_path, step) / "COMPLETE").unlink()
    (tmp_path / "notes").mkdir()
    assert prune(tmp_path, 1, 0) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step_00000004", "step_00000006"]
