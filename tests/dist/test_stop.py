"""The launcher is asked to stop: while its ranks start, and by every signal that a terminal, a person or Slurm sends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.dist.harness import TRAINER, Job, events, start
from tests.tiny import write_run

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(400)]
LONG = 100_000  # steps that no test waits for


def launch(ranks: int, log: Path, config: Path, *overrides: str) -> Job:
    launcher = ["-m", "egmla_megatron.launch", "--standalone", f"--nproc-per-node={ranks}"]
    return start(1, [*launcher, *TRAINER, str(config), *overrides], log)


def wait_for_ranks(job: Job, count: int) -> None:
    """Until they are processes of their own, long before they have handlers."""
    while True:
        assert job.process.poll() is None, job.output
        children = psutil.Process(job.process.pid).children()
        if sum("egmla_megatron.train" in child.cmdline() for child in children) == count:
            return
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_while_the_ranks_start(tmp_path: Path, number: signal.Signals) -> None:
    config, run = write_run(tmp_path, "run", train={"steps": LONG})
    job = launch(2, tmp_path / "log", config)
    wait_for_ranks(job, 2)
    time.sleep(1.0)  # among the imports
    os.kill(job.process.pid, number)
    assert job.wait() == 128 + number, job.output
    assert f"stopped by {number.name} before training began" in job.output
    assert "error: " not in job.output and "Traceback" not in job.output
    assert not (run / "metrics.jsonl").exists()


@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGHUP, 2), (signal.SIGQUIT, 1)])
def test_a_closed_terminal_saves_and_stops(tmp_path: Path, number: signal.Signals, ranks: int) -> None:
    config, run = write_run(tmp_path, "run", train={"steps": LONG})
    job = launch(ranks, tmp_path / "log", config, "data.num_workers=1")
    job.wait_for("step       3/")
    os.kill(job.process.pid, number)
    assert job.wait() == 128 + number, job.output
    assert "Traceback" not in job.output
    (end,) = events(run, "end")
    assert end["signal"] == number and end["reason"].startswith(f"stopped by signal {int(number)}, saved")
    assert events(run, "checkpoint")[-1]["step"] == end["step"]
