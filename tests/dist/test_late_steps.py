"""Steps that are launched before the one before them is done, on a CPU: the same run, its times, signals, bad steps."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.dist.harness import ROOT, Job, events, start, start_trainer, trained
from tests.tiny import write_run

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(400)]
SECTIONS: dict[str, Any] = {
    "train": {"steps": 9, "eval_interval": 3, "eval_batches": 1},
    "checkpoint": {"interval_steps": 4, "keep": 0},
    "optimizer": {"distributed": True, "lr": 1e-2, "warmup_steps": 1},
}
PARTS = ("data", "forward_backward", "exchange", "gradient_sync", "optimizer")


def start_late(log: Path, config: Path, **env: str) -> Job:
    return start(1, [str(ROOT / "tests/dist/late_worker.py"), str(config)], log, warm=True, **env)


def numbers(run: Path, kind: str, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(event[name] for name in names) for event in events(run, kind)]


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folder of nine late steps."""
    folder = tmp_path_factory.mktemp("late")
    config, run = write_run(folder, "run", **SECTIONS)
    assert "at once 2\n" in start_late(folder / "log", config).succeed()
    return run


def test_the_same_run(late: Path, tmp_path: Path) -> None:
    """Evaluations and checkpoints are of the weights of their step."""
    import torch

    from egmla_megatron.checkpoint.load import read_full_weights

    config, run = write_run(tmp_path, "run", **SECTIONS)
    start_trainer(1, tmp_path / "log", config).succeed()
    assert trained(late) == trained(run) and sorted(trained(run)) == list(range(1, 10))
    evaluated = numbers(late, "eval", "step", "val_loss")
    assert evaluated == numbers(run, "eval", "step", "val_loss") and [step for step, _ in evaluated] == [3, 6, 9]
    assert numbers(late, "checkpoint", "step") == numbers(run, "checkpoint", "step") == [(4,), (8,), (9,)]
    for step in (4, 8, 9):
        got, expected = (read_full_weights(each / f"checkpoints/step_{step:08d}")[0] for each in (late, run))
        assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_a_step_takes_its_own_time(late: Path) -> None:
    """Here the host takes all of it, as where kernels are launched one by one: the end of a step is noticed when the
    next is launched, and that of a step before an evaluation at once."""
    steps = events(late, "step")
    for step in steps:
        assert 0 < sum(step[f"time_{name}_s"] for name in PARTS) <= step["step_time_s"], step["step"]
    (end,) = events(late, "end")
    phases = ("training", "warmup", "profile", "evaluation", "checkpoint")
    assert sum(end[f"{name}_s"] for name in phases) <= end["total_s"]
    assert [step["slowest_rank"] for step in steps] == [None, None] + [0] * 7


def test_a_signal_saves_the_step_that_is_under_way(tmp_path: Path) -> None:
    config, run = write_run(tmp_path, "run", **SECTIONS)
    job = start_late(tmp_path / "log", config, LATE_STOP_AT="5")
    assert job.wait() == 128 + signal.SIGTERM, job.output
    assert numbers(run, "checkpoint", "step") == [(4,), (5,)] and numbers(run, "end", "step") == [(5,)]
    start_trainer(1, tmp_path / "again.log", config).succeed()
    assert numbers(run, "start", "step") == [(0,), (5,)] and sorted(trained(run)) == list(range(1, 10))


def test_none_is_under_way_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    config, _ = write_run(tmp_path, "run", **SECTIONS)
    assert "at once 1\n" in start_late(tmp_path / "log", config, LATE_WRITING="1").succeed()


def test_no_checkpoint_of_bad_steps_pushes_good_ones_out(tmp_path: Path) -> None:
    """The save that was due in a bad step is made behind the first good one; the last one deletes nothing."""
    checkpoint = {"interval_steps": 2, "keep": 2}
    config, run = write_run(tmp_path, "run", **{**SECTIONS, "checkpoint": checkpoint})
    output = start_late(tmp_path / "log", config, LATE_BAD="4 5 6 9").succeed()
    assert numbers(run, "checkpoint", "step") == [(2,), (7,), (8,), (9,)]
    assert sorted(path.name[-1] for path in (run / "checkpoints").iterdir()) == ["7", "8", "9"]
    assert numbers(run, "end", "skipped_steps") == [(4,)] and "skipped_steps 4, not finite" in output


def test_the_last_step_of_a_start_always_has_a_line(tmp_path: Path) -> None:
    """Steps are logged seldom. At the last one, too, the checkpoint comes before the evaluation."""
    config, run = write_run(tmp_path, "run", **SECTIONS, logging={"interval_steps": 4})
    job = start_late(tmp_path / "log", config, LATE_STOP_AT="6")
    assert job.wait() == 128 + signal.SIGTERM, job.output
    assert numbers(run, "step", "step") == [(4,), (6,)]
    start_trainer(1, tmp_path / "again.log", config).succeed()
    assert numbers(run, "step", "step") == [(4,), (6,), (8,), (9,)]
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    second = [(line["kind"], line["step"]) for line in lines][-6:]
    assert second == [("step", 8), ("checkpoint", 8), ("step", 9), ("checkpoint", 9), ("eval", 9), ("end", 9)]
