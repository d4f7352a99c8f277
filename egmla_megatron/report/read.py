"""Reads what a run wrote: RUN_DIR/metrics.jsonl and RUN_DIR/config.yaml.

A run that stopped and went on repeats steps. Each start line says how many steps were done when it began;
what an earlier start had done beyond that was lost with it, and leaves the curve.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from egmla_megatron.config.load import load_config
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.errors import UserError
from egmla_megatron.report.peaks import PEAK, RESERVED, Peak, largest, peak_of
from egmla_megatron.report.restarts import LostTime
from egmla_megatron.train.events import EVENTS

__all__ = ["RunMetrics", "evaluation_at", "read_run"]

Record = dict[str, Any]
_NUMBERS = {
    name for kind in ("step", "eval") for name in EVENTS[kind] if name not in ("skipped", "slowest_node")
}  # fmt: skip


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
    restart_s: float = 0.0  # lost in restarts (restarts.py)
    peaks: list[Peak | None] = field(default_factory=list)  # memory, of every start (peaks.py)
    reserved_peaks: list[Peak | None] = field(default_factory=list)  # by torch's allocator on a GPU
    torn_lines: int = 0  # lines cut short by a crash, or not of a run
    label: str = ""  # where several runs have one name

    @property
    def name(self) -> str:
        """Label of the run."""
        return self.label or self.config.run.name

    @property
    def restarts(self) -> list[Record]:
        """All starts but the first."""
        return self.starts[1:]

    def steady_steps(self) -> list[Record]:
        """Steps that count in the throughput: without the first `logging.warmup_steps` after each start, and those
        that were profiled (the one before them prepares the profiler)."""
        warmup = self.config.logging.warmup_steps
        slow = [(start.get("step", 0), start.get("step", 0) + warmup) for start in self.starts] or [(0, warmup)]
        if self.config.profile.steps:
            first, last = self.config.profile.steps
            slow.append((first - 2, last))
        return [step for step in self.steps if not any(begin < step["step"] <= end for begin, end in slow)]

    def seconds_of_lines(self) -> list[float]:
        """For each line of `steps` the time since the one before, nan where it has none: steps without a line took as
        long as the next one that has."""
        numbers = [0, *(step["step"] for step in self.steps)]
        times = [step.get("step_time_s") for step in self.steps]
        return [
            math.nan if time is None else (now - before) * time
            for (before, now), time in zip(pairwise(numbers), times, strict=True)
        ]

    def last_start(self) -> RunMetrics:
        """The steps since the last start alone: another start may have had other ranks."""
        if len(self.starts) < 2:
            return self
        begun = self.starts[-1].get("step", 0)
        steps = [step for step in self.steps if step["step"] > begun]
        peaks, reserved = self.peaks[-1:], self.reserved_peaks[-1:]
        return replace(self, starts=self.starts[-1:], steps=steps, peaks=peaks, reserved_peaks=reserved)


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
    lost = LostTime()
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        record = _parse(line)
        if record is None:
            metrics.torn_lines += bool(line.strip())
            continue
        _add(metrics, steps, evals, record)
        lost.read(record)
    metrics.restart_s = lost.total()
    metrics.steps = [steps[step] for step in sorted(steps)]
    metrics.evals = [evals[step] for step in sorted(evals)]
    if not metrics.steps:
        every = metrics.config.logging.interval_steps
        raise UserError(
            f"nothing to report in {path}: got no finished step; wait for the run's first line "
            f"(logging.interval_steps={every})"
        )
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
    """Returns the line's object, None when the line was cut short or is of no run."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or "kind" not in record:
        return None
    counted = record["kind"] not in ("step", "eval") or _is_number(record.get("step"))
    numbers = all(_is_number(value) for name, value in record.items() if name in _NUMBERS and value is not None)
    return record if counted and numbers else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _add(metrics: RunMetrics, steps: dict[int, Record], evals: dict[int, Record], record: Record) -> None:
    kind = record["kind"]
    for peaks, name in ((metrics.peaks, PEAK), (metrics.reserved_peaks, RESERVED)):
        if kind == "start" or not peaks:
            peaks.append(None)
        if kind in ("step", "end"):
            peaks[-1] = largest((peaks[-1], peak_of(record, name)))
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
