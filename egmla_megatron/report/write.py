"""Writes report.md and its plots for one run, and comparison.md for several."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from egmla_megatron.errors import UserError
from egmla_megatron.report import tables
from egmla_megatron.report.plots import plot_comparison, plot_loss, plot_throughput
from egmla_megatron.report.read import RunMetrics, read_run
from egmla_megatron.report.summary import summarize

__all__ = ["write_comparison", "write_report"]


def write_report(run_dir: str | Path) -> Path:
    """Writes report.md, loss.png and throughput.png into `run_dir` and returns the path of report.md.

    Raises UserError when the folder holds no run.
    """
    metrics = read_run(run_dir)
    plot_loss(metrics, metrics.run_dir / "loss.png")
    plot_throughput(metrics, metrics.run_dir / "throughput.png")
    return _write_text(metrics.run_dir / "report.md", _report(metrics))


def write_comparison(run_dirs: Sequence[str | Path], out: str | Path) -> Path:
    """Writes comparison.md and comparison.png of two or more runs into `out` and returns the path of comparison.md."""
    if len(run_dirs) < 2:
        raise UserError(f"comparison: got {len(run_dirs)} run; allowed: two or more run folders")
    runs = [read_run(run_dir) for run_dir in run_dirs]
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    plot_comparison(runs, folder / "comparison.png")
    sources = "\n".join(f"- {metrics.name}: `{metrics.run_dir}`" for metrics in runs)
    text = f"# Comparison of {len(runs)} runs\n\n![loss](comparison.png)\n\n{tables.comparison(runs)}\n\n"
    text += "Training loss is the mean of the last 10 steps; tokens/s is the median with its quartiles, without\n"
    text += f"warm-up steps.\n\n{sources}\n"
    return _write_text(folder / "comparison.md", text)


def _report(metrics: RunMetrics) -> str:
    summary = summarize(metrics)
    warmup = metrics.config.logging.warmup_steps
    parts = [
        f"# {metrics.name}",
        "## Results",
        tables.results(summary),
        "![training and validation loss](loss.png)",
        "## Throughput",
        f"The first {warmup} steps after each start do not count.",
        tables.throughput(summary),
        "![tokens per second and peak memory](throughput.png)",
        "## Configuration",
        tables.configuration(metrics),
        "## Restarts",
        tables.restarts(metrics),
    ]
    if metrics.torn_lines:
        parts.append(f"Lines of metrics.jsonl that a crash cut short, left out: {metrics.torn_lines}.")
    return "\n\n".join(parts) + "\n"


def _write_text(path: Path, text: str) -> Path:
    """Writes by way of a temporary name, so that a reader never sees half a report."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
    return path
