"""Reads what a run wrote: RUN_DIR/metrics.jsonl and RUN_DIR/config.yaml.

A run that stopped and went on repeats steps. Each start line says how many steps were done when it began;
what an earlier start had done beyond that was lost with it, and leaves the curve.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from egmla_megatron.config.load import load_config
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.errors import UserError

__all__ = ["RunMetrics", "evaluation_at", "read_run"]

Record = dict[str, Any]


@dataclass
class RunMetrics:
    """One run's records. `steps` and `evals` hold the surviving record of every step, ascending."""

    run_dir: Path
    config: RunConfig
    starts: list[Record] = field(default_factory=list)
    steps: list[Record] = field(default_factory=list)
    evals: list[Record] = field(default_factory=list)
    checkpoints: list[Record] = field(default_factory=list)
    ends: list[Record] = field(default_factory=list)
    lost_steps: int = 0  # steps whose work a restart threw away
    torn_lines: int = 0  # lines cut short by a crash

    @property
    def name(self) -> str:
        """Label of the run."""
        return self.config.run.name

    @property
    def restarts(self) -> list[Record]:
        """All starts but the first."""
        return self.starts[1:]

    def steady_steps(self) -> list[Record]:
        """Steps that count in the throughput: without the first `logging.warmup_steps` after each start."""
        warmup = self.config.logging.warmup_steps
        cold = [start.get("step", 0) for start in self.starts] or [0]
        return [step for step in self.steps if not any(begun < step["step"] <= begun + warmup for begun in cold)]


def read_run(run_dir: str | Path) -> RunMetrics:
    """Reads the records of `run_dir`. Raises UserError when there is no run or no finished step in it."""
    folder = Path(run_dir)
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise UserError(
            f"no run in {folder}: got no metrics.jsonl; allowed: the folder named by run.dir of a training run"
        )
    config_path = folder / "config.yaml"
    metrics = RunMetrics(folder, load_config(config_path) if config_path.is_file() else RunConfig())
    steps: dict[int, Record] = {}
    evals: dict[int, Record] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        record = _parse(line)
        if record is None:
            metrics.torn_lines += bool(line.strip())
            continue
        _add(metrics, steps, evals, record)
    metrics.steps = [steps[step] for step in sorted(steps)]
    metrics.evals = [evals[step] for step in sorted(evals)]
    if not metrics.steps:
        raise UserError(f"nothing to report in {path}: got no finished step; wait for the run's first step")
    return metrics


def evaluation_at(run_dir: str | Path, step: int) -> Record | None:
    """The newest evaluation of a run at or before `step`; None when there is none, or no metrics.jsonl."""
    try:
        metrics = read_run(run_dir)
    except UserError:  # no metrics, or none yet
        return None
    evals = [record for record in metrics.evals if record["step"] <= step]
    return evals[-1] if evals else None


def _parse(line: str) -> Record | None:
    """Returns the line's object, None when the line was cut short."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "kind" in record else None


def _add(metrics: RunMetrics, steps: dict[int, Record], evals: dict[int, Record], record: Record) -> None:
    kind = record["kind"]
    if kind == "start":
        done = record.get("step", 0)
        for series in (steps, evals):
            for step in [step for step in series if step > done]:
                metrics.lost_steps += series is steps
                del series[step]
        metrics.starts.append(record)
    elif kind == "step":
        steps[record["step"]] = record
    elif kind == "eval":
        evals[record["step"]] = record
    elif kind == "checkpoint":
        metrics.checkpoints.append(record)
    elif kind == "end":
        metrics.ends.append(record)
