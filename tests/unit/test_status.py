"""How a run stands: what `launch/status.sh` says of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from egmla_megatron.config.load import dump_yaml
from egmla_megatron.errors import UserError
from egmla_megatron.launching.ledger import Launch, read_tail, record_start
from egmla_megatron.launching.status import format_status, read_status
from egmla_megatron.report.read import read_run
from tests.tiny import tiny_run


def launch(started_unix_s: float, job: str = "7") -> Launch:
    return Launch(job, 0, ("a", "b"), 2, started_unix_s, 0)


def write_metrics(folder: Path, now: float) -> None:
    cfg = tiny_run(folder=str(folder), train={"steps": 100}, checkpoint={"interval_steps": 20})
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(dump_yaml(cfg))
    records: list[dict[str, Any]] = [{"kind": "start", "step": 0}]
    records += [{"kind": "step", "step": step, "loss": 5.0 - step / 100, "step_time_s": 2.0} for step in range(1, 31)]
    records += [{"kind": "eval", "step": 20, "val_loss": 4.9, "val_ppl": 130.0}, {"kind": "start", "step": 20}]
    records += [{"kind": "step", "step": step, "loss": 4.0, "step_time_s": 2.0} for step in (21, 22, 23, 24, 25)]
    lines = [json.dumps({**record, "unix_time_s": now - 60 + index}) for index, record in enumerate(records)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n" + '{"kind": "st')


def test_the_status_of_a_run(tmp_path: Path) -> None:
    now = time.time()
    with pytest.raises(UserError, match=r"RUN_DIR: got .*no config\.yaml"):
        read_status(tmp_path)
    write_metrics(tmp_path, now)
    record_start(tmp_path, launch(now - 70))
    status = read_status(tmp_path, now)
    assert (status["state"], status["step"], status["restarts"]) == ("running", 25, 1)  # not 30: that work was lost
    assert status["eta_s"] == 150.0 and status["next_checkpoint"] == {"step": 40, "in_s": 30.0}
    assert status["tokens_per_second"] == 4 * 16 / 2.0
    text = format_status(status, now)
    assert "step 25 of 100 (25.0%), 0.002 M of 0.006 M tokens" in text
    assert "0:02:30 to go" in text and "next at step 40 in 0:00:30" in text
    assert "25: 4.0000" in text and "20: loss 4.9000" in text and "job 7, restart 0, 2 ranks on a, b" in text
    assert "no sign of life for" in read_status(tmp_path, now + 3600)["state"]
    assert read_tail(tmp_path).steps[-1]["step"] == 25
    (tmp_path / "metrics.jsonl").unlink()
    waiting = format_status(read_status(tmp_path, now), now)
    assert "starting" in waiting and "no step yet" in waiting and "none yet" in waiting and "damaged" not in waiting
    (tmp_path / "checkpoints/step_00000020").mkdir(parents=True)
    assert "damaged      step_00000020: COMPLETE is missing" in format_status(read_status(tmp_path, now), now)


def test_restarts_are_starts_of_training_behind_the_first_as_in_the_report(tmp_path: Path) -> None:
    """Launches whose checks failed are no starts, and starts without a launcher are; a long run has many lines."""
    now = time.time()
    write_metrics(tmp_path, now)
    for job in "123":
        record_start(tmp_path, launch(now - 70, job))
    status = read_status(tmp_path, now)
    assert status["restarts"] == len(read_run(tmp_path).restarts) == 1 and status["launches_recorded"] == 3
    assert "restarts     1 (launches recorded: 3)" in format_status(status, now)
    first, *rest = (tmp_path / "metrics.jsonl").read_text().splitlines()
    filler = [json.dumps({"kind": "note", "text": "x" * 1000})] * 1100
    (tmp_path / "metrics.jsonl").write_text("\n".join([first, *filler, *rest]) + "\n")
    assert len(read_tail(tmp_path).starts) == 1 and read_status(tmp_path, now)["restarts"] == 1


def test_a_run_that_died_is_not_running(tmp_path: Path) -> None:
    """Its lock says so at once: no process holds it."""
    write_metrics(tmp_path / "run", time.time())
    assert read_status(tmp_path / "run")["state"] == "running"  # no lock file: an older run, or a disk without locks
    held = "import sys, time, pathlib; from egmla_megatron.train.lock import lock_run_dir as lock; "
    held += "file = lock(pathlib.Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", held, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    status = read_status(tmp_path / "run")
    assert status["state"] == "running" and "if it runs on" in format_status(status)
    holder.kill()
    holder.wait()
    status = read_status(tmp_path / "run")
    assert status["state"].startswith("not running: it ended without a word")
    assert "if it runs on" not in format_status(status)


def test_losses_are_of_steps_that_count(tmp_path: Path) -> None:
    write_metrics(tmp_path / "run", time.time())
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        after = {"unix_time_s": time.time() + 1}
        file.write("\n" + json.dumps({"kind": "start", "step": 23, **after}) + "\n")
        file.write(json.dumps({"kind": "step", "step": "24", "loss": 1.0, "step_time_s": 2.0, **after}) + "\n")
        file.write(json.dumps({"kind": "step", "step": 24, "loss": 3.5, "step_time_s": 2.0, **after}) + "\n")
    losses = read_status(tmp_path / "run")["losses"]
    assert [each["step"] for each in losses] == [20, 21, 22, 23, 24] and losses[-1]["loss"] == 3.5
