"""Starts that have nothing left to do, or that leave nothing behind, say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.harness import events, start_trainer
from tests.tiny import write_run

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(400)]


def test_a_complete_run_is_left_alone(tmp_path: Path) -> None:
    config, run = write_run(tmp_path, "run", train={"steps": 3, "eval_batches": 1})
    start_trainer(2, tmp_path / "first.log", config).succeed()
    (run / "metrics.jsonl").rename(tmp_path / "kept")
    lines = (tmp_path / "kept").read_text().splitlines(keepends=True)
    kinds = [line.split('"')[3] for line in lines]
    assert kinds == ["start", "step", "step", "step", "checkpoint", "eval", "end"]
    before = "".join(lines[:-2])  # stopped between the last step and its evaluation
    (run / "metrics.jsonl").write_text(before)
    start_trainer(1, tmp_path / "second.log", config).succeed()
    assert [event["step"] for event in events(run, "eval")] == [3] and len(events(run, "start")) == 2
    saved, config_file = (run / "metrics.jsonl").read_text(), (run / "config.yaml").read_text()
    again = start_trainer(2, tmp_path / "third.log", config)
    fewer = start_trainer(1, tmp_path / "fourth.log", config, "train.steps=2", "--check").succeed()
    assert "complete step 3: all of them, nothing is left to train" in again.succeed()
    assert "ok: " in fewer and "complete step 3: more than the 2 asked for" in fewer and "raise train.steps" in fewer
    fewer = start_trainer(1, tmp_path / "fifth.log", config, "train.steps=2").succeed()
    assert "complete step 3: more than the 2 asked for" in fewer
    assert ((run / "metrics.jsonl").read_text(), (run / "config.yaml").read_text()) == (saved, config_file)


def test_a_start_that_saves_nothing_says_that_every_other_repeats_it(tmp_path: Path) -> None:
    config, run = write_run(tmp_path, "run", train={"exit_after_steps": 2}, checkpoint={"at_end": False})
    output = start_trainer(1, tmp_path / "log", config).succeed()
    hint = "steps 1 to 2 not saved (checkpoint.at_end=false), the next start repeats them, as would every other: set "
    assert hint + "checkpoint.at_end=true, or checkpoint.interval_steps to 1..2" in output
    (end,) = events(run, "end")
    assert end["reason"].startswith("train.exit_after_steps reached; steps 1 to 2 not saved")
