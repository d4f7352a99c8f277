"""The result as one figure that survives a black-and-white printer: hatches and numbers, not colours alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["draw"]

Row = dict[str, Any]
_REPLICATED, _SHARDED, _MARK = "#BBBBBB", "#56B4E9", "#D55E00"  # of the Okabe-Ito palette, light enough for print


def draw(result: dict[str, Any], path: Path) -> None:
    """Step time, bytes sent and, where it is known, peak memory of every variant to `path` (.png or .svg)."""
    rows = result["rows"]
    panels = [_step_times, _bytes_sent]
    if all(row["peak_mib"] is not None for row in rows):
        panels.append(_memory)
    figure = Figure(figsize=(4.2 * len(panels) + 2.4, 0.55 * len(rows) + 1.8), dpi=160, layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True)
    for each, panel in zip(axes, panels, strict=True):
        panel(each, rows)
        each.grid(True, axis="x", color="#dddddd", linewidth=0.6)
        each.set_axisbelow(True)
        each.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(rows)), [row["variant"].replace("_", " ") for row in rows])
    axes[0].invert_yaxis()
    settings = result["settings"]
    figure.suptitle(
        f"{settings['config']['model']['name']}, {settings['ranks']} ranks, link {result['link']['gb_per_s']:.2g} GB/s"
    )
    figure.savefig(path, format=path.suffix[1:].lower())


def _bars(axes: Axes, rows: Sequence[Row], values: Sequence[float], form: str, reach: Sequence[float]) -> None:
    """Horizontal bars, each with its number behind `reach`, the end of what is drawn in its line."""
    sharded = [row["gate_group"] > 1 for row in rows]
    bars = axes.barh(range(len(rows)), values, color=[_SHARDED if each else _REPLICATED for each in sharded])
    for bar, each in zip(bars, sharded, strict=True):
        bar.set(edgecolor="black", linewidth=0.6, hatch="" if each else "///")
    widest = max(reach)
    for index, (value, end) in enumerate(zip(values, reach, strict=True)):
        axes.text(end + 0.02 * widest, index, format(value, form), va="center", fontsize=8)
    axes.set_xlim(0, 1.25 * widest)


def _step_times(axes: Axes, rows: Sequence[Row]) -> None:
    medians = [row["step_ms_median"] for row in rows]
    below = [row["step_ms_median"] - row["step_ms_p10"] for row in rows]
    above = [row["step_ms_p90"] - row["step_ms_median"] for row in rows]
    _bars(axes, rows, medians, ",.1f", [row["step_ms_p90"] for row in rows])
    axes.errorbar(medians, range(len(rows)), xerr=[below, above], fmt="none", ecolor="black", elinewidth=1, capsize=3)
    exposed = [row["exposed_ms"] or 0.0 for row in rows]
    if any(exposed):
        axes.barh(range(len(rows)), exposed, height=0.3, color=_MARK, label="exposed exchange")
        axes.legend(frameon=False, fontsize=8)
    axes.set_xlabel(f"step, ms (median, p10 to p90, n = {rows[0]['n']})")


def _bytes_sent(axes: Axes, rows: Sequence[Row]) -> None:
    sent = [row["bytes_sent_per_rank"] / 1e6 for row in rows]
    predicted = [row["bytes_predicted_per_rank"] / 1e6 for row in rows]
    _bars(axes, rows, sent, ",.1f", list(map(max, sent, predicted)))
    axes.plot(predicted, range(len(rows)), "|", color=_MARK, markersize=14, markeredgewidth=2, label="predicted")
    axes.legend(frameon=False, fontsize=8)
    axes.set_xlabel("sent by a rank in a step, MB")


def _memory(axes: Axes, rows: Sequence[Row]) -> None:
    peaks = [row["peak_mib"] for row in rows]
    _bars(axes, rows, peaks, ",.0f", peaks)
    axes.set_xlabel("peak memory of a rank, MiB")
