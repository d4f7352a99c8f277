"""What the end of a start says to the one who started it."""

from __future__ import annotations

from pathlib import Path

import pytest

from egmla_megatron.train.endings import not_saved, too_many_bad_steps
from egmla_megatron.train.sinks import Console
from egmla_megatron.train.step import StepResult
from tests.tiny import tiny_run
from tests.unit.test_checkpoint_manifest import save

BAD = StepResult(loss=float("nan"), grad_norm=float("inf"), applied=False)


@pytest.mark.parametrize(
    ("start", "saved", "step", "said"),
    [
        (0, 6, 6, ""),
        (4, 4, 4, ""),
        (0, 5, 6, "; step 6 not saved (checkpoint.at_end=false), the next start repeats them"),
        (0, 3, 6, "; steps 4 to 6 not saved (checkpoint.at_end=false), the next start repeats them"),
    ],
)
def test_what_is_not_saved(start: int, saved: int, step: int, said: str) -> None:
    assert not_saved(start, saved, step, 9) == said


def test_what_every_start_would_repeat() -> None:
    hint = not_saved(4, 4, 6, 9)
    assert hint.endswith("as would every other: set checkpoint.at_end=true, or checkpoint.interval_steps to 1..2")
    assert "every other" not in not_saved(4, 4, 9, 9)  # a whole run that was measured


def test_too_many_bad_steps(tmp_path: Path) -> None:
    cfg = tiny_run(folder=str(tmp_path), train={"max_bad_steps": 1})
    said = too_many_bad_steps(cfg, 1, 7, BAD)
    assert said.startswith(
        "training: 1 step gave no finite gradient (last: step 7, loss nan, grad_norm inf), allowed none"
    )
    assert "(train.max_bad_steps=1)" in said
    assert said.endswith("start again: it begins anew from the beginning, there is no checkpoint of this run")
    loaded = tiny_run(folder=str(tmp_path), checkpoint={"load": "runs/other"})
    assert "it begins anew from runs/other, there" in too_many_bad_steps(loaded, 1, 7, BAD)
    save(tmp_path / "checkpoints", 5)
    cfg = tiny_run(folder=str(tmp_path), train={"max_bad_steps": 3})
    said = too_many_bad_steps(cfg, 3, 7, BAD)
    assert "3 steps in a row gave no finite gradient" in said and "allowed up to 2 (train.max_bad_steps=3)" in said
    assert said.endswith("start again: it goes on from step_00000005")


def test_the_end_line_names_skipped_steps() -> None:
    phases = dict.fromkeys((f"{name}_s" for name in ("training", "warmup", "evaluation", "checkpoint", "profile")), 0.0)
    event = {"step": 9, "reason": "done", "skipped_steps": 2, "tokens_per_second": None, "total_s": 1.0, **phases}
    assert "step 9: done; skipped_steps 2, not finite;" in Console._end(event)
    assert "skipped" not in Console._end({**event, "skipped_steps": 0})
