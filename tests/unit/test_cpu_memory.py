"""Predicted resident memory of a training on a CPU against that of the real trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from egmla_megatron.config.check import check_config
from egmla_megatron.config.load import load_config
from egmla_megatron.report.cpu_memory import predict_resident_mib, resident_mib
from tests.dist.harness import environment, events
from tests.tiny import write_dataset

TRAIN = """
import json, sys
import egmla_megatron.train.session
from egmla_megatron.report.cpu_memory import resident_mib
from egmla_megatron.train.main import main
open(sys.argv[1], "w").write(json.dumps(resident_mib()))
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.timeout(200)
def test_the_quickstart_on_one_rank(root: Path, tmp_path: Path) -> None:
    """Three steps of the real model on random ids; a step's peak is that of those before it."""
    prefix = write_dataset(tmp_path / "train", 400, vocab_size=8192)
    own = [f"run.dir={tmp_path / 'run'}", f"data.train=[{prefix}]", "data.eod_id=0", "parallel.gate_group=1"]
    own += ["train.steps=4", "optimizer.warmup_steps=1", "checkpoint.at_end=false", "logging.tensorboard=false"]
    own += ["train.global_batch_size=8"]
    command = [sys.executable, "-W", "ignore", "-c", TRAIN, str(tmp_path / "process"), "quickstart", *own]
    kept = "PYTHONPYCACHEPREFIX"  # where bytecode is kept already, compiling all of torch would take most of the time
    env = environment(**({kept: os.environ[kept]} if kept in os.environ else {}))
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 0, done.stderr[-2000:]
    measured = max(step["peak_memory_mib"] for step in events(tmp_path / "run", "step"))
    cfg = load_config("quickstart", own)
    process = json.loads((tmp_path / "process").read_text())
    parts = predict_resident_mib(cfg, check_config(cfg, 1), process)
    print(f"predicted {parts}, measured {measured}: {parts['total'] / measured - 1:+.1%}")
    assert parts["total"] == pytest.approx(measured, rel=0.15)
    assert process < 0.85 * measured  # so that the process alone would not pass


def test_parts() -> None:
    cfg = load_config("quickstart", ["train.global_batch_size=16"])
    layout = check_config(cfg, 2)
    parts = predict_resident_mib(cfg, layout, 500.0)
    assert parts["process"] == 500.0 and parts["total"] == sum(parts.values()) - parts["total"]
    wider = replace(cfg, train=replace(cfg.train, micro_batch_size=8))
    more = predict_resident_mib(wider, check_config(wider, 2), 500.0)
    assert more["activations"] == pytest.approx(2 * parts["activations"], rel=0.02)
    assert more["weights"] == parts["weights"]
    mine = resident_mib()
    assert mine is None or mine > 1
