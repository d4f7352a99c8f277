"""Writes the report of one run and the comparison of several: Markdown with plots beside it, and one HTML file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import combinations
from pathlib import Path

from egmla_megatron.errors import UserError
from egmla_megatron.folders import refuse_unwritable, replace_text
from egmla_megatron.report import predicted, tables, times
from egmla_megatron.report.comparison import comparison
from egmla_megatron.report.html import to_html
from egmla_megatron.report.plots import plot_comparison, plot_loss, plot_parts, plot_throughput
from egmla_megatron.report.read import RunMetrics, read_run
from egmla_megatron.report.summary import summarize

__all__ = ["write_comparison", "write_report"]


def write_report(run_dir: str | Path, out: str | Path | None = None) -> Path:
    """Writes report.md, its plots and report.html into `run_dir`, or `out`; returns the path of report.md.

    Raises UserError when the folder holds no run, or cannot be written.
    """
    metrics = read_run(run_dir)
    folder = metrics.run_dir if out is None else Path(out)
    refuse_unwritable("RUN_DIR" if out is None else "--out", folder)
    folder.mkdir(parents=True, exist_ok=True)
    plot_loss(metrics, folder / "loss.png")
    plot_throughput(metrics, folder / "throughput.png")
    plot_parts(metrics, folder / "step_time.png")
    return _write_both(folder / "report.md", _report(metrics), metrics.name)


def write_comparison(run_dirs: Sequence[str | Path], out: str | Path) -> Path:
    """Writes comparison.md with plots and comparison.html of two or more runs into `out`; the path of comparison.md."""
    if len(run_dirs) < 2:
        raise UserError(f"comparison: got {len(run_dirs)} run; allowed: two or more run folders")
    runs = [read_run(run_dir) for run_dir in run_dirs]
    folder = Path(out)
    refuse_unwritable("--out", folder)
    _tell_apart(runs)
    folder.mkdir(parents=True, exist_ok=True)
    plot_comparison(runs, folder / "comparison.png", over="tokens")
    plot_comparison(runs, folder / "comparison_time.png", over="time")
    sources = "\n".join(f"- {metrics.name}: `{metrics.run_dir}`" for metrics in runs)
    text = f"# Comparison of {len(runs)} runs\n\n{_warning(runs)}![loss over tokens](comparison.png)\n\n"
    text += f"![loss over time in steps](comparison_time.png)\n\n{comparison(runs)}\n\n"
    text += "Training loss is the mean of the last 10 lines; tokens/s is the median, with the quartiles of the\n"
    text += f"n steps without warm-up.\n\n{sources}\n"
    return _write_both(folder / "comparison.md", text, f"Comparison of {len(runs)} runs")


def _tell_apart(runs: Sequence[RunMetrics]) -> None:
    """Runs of one name get their folders behind it."""
    names = [metrics.name for metrics in runs]
    for metrics in runs:
        if names.count(metrics.config.run.name) > 1:
            metrics.label = f"{metrics.config.run.name} ({metrics.run_dir.resolve().name})"


def _warning(runs: Sequence[RunMetrics]) -> str:
    """Losses in nats per token mean nothing beside each other when the tokens are not the same."""
    tokens = [_Tokens.of(metrics) for metrics in runs]
    if all(one.same_as(other) for one, other in combinations(tokens, 2)):
        return ""
    named = "; ".join(sorted({str(each) for each in tokens}))
    return f"**Warning: these runs count different tokens ({named}); their losses cannot be compared.**\n\n"


@dataclass(frozen=True)
class _Tokens:
    """What a run counts."""

    tokenizer: str  # path, empty: not named
    sha256: str | None  # of the tokenizer, where the data knew it
    vocab_size: int  # with padding

    @classmethod
    def of(cls, metrics: RunMetrics) -> _Tokens:
        start = metrics.starts[-1] if metrics.starts else {}
        path = metrics.config.data.tokenizer
        return cls(
            os.path.normpath(path) if path else "", start.get("tokenizer_sha256"), metrics.config.model.vocab_size
        )

    def same_as(self, other: _Tokens) -> bool:
        """By checksum, whatever the paths and the padding; by path and size only where one of them knows none."""
        if self.sha256 and other.sha256:
            return self.sha256 == other.sha256
        return (self.tokenizer, self.vocab_size) == (other.tokenizer, other.vocab_size)

    def __str__(self) -> str:
        kind = f"sha256 {self.sha256[:8]}" if self.sha256 else "checksum not known"
        return f"{self.tokenizer or 'not named'}, {kind}, {self.vocab_size} ids"


def _report(metrics: RunMetrics) -> str:
    summary = summarize(metrics)
    warmup = metrics.config.logging.warmup_steps
    split = times.split(metrics)
    parts = [
        f"# {escape(metrics.name)}",
        "## Results",
        tables.results(summary),
        "![training and validation loss](loss.png)",
        "## Throughput",
        f"The first {warmup} steps after each start do not count, nor do profiled steps, evaluations and checkpoints.",
        tables.throughput(summary),
        "![tokens per second and peak memory](throughput.png)",
        *(["## Where a step's time goes", split, "![parts of every step](step_time.png)"] if split else []),
        times.stragglers(metrics),
        "## Where the run's time went",
        times.spent(metrics),
        "## Predicted and measured",
        predicted.prediction(metrics),
        predicted.memory_prediction(metrics),
        "## Configuration",
        tables.configuration(metrics),
        "## Restarts",
        tables.restarts(metrics),
    ]
    if metrics.torn_lines:
        parts.append(f"Lines of metrics.jsonl that a crash cut short, left out: {metrics.torn_lines}.")
    return "\n\n".join(filter(None, parts)) + "\n"


def _write_both(path: Path, text: str, title: str) -> Path:
    """Markdown at `path`, and the same as .html with the plots inside; `path`."""
    replace_text(path.with_suffix(".html"), to_html(text, path.parent, title))
    replace_text(path, text)
    return path
