"""Loss and throughput of runs as PNG files, readable in print and by the colour-blind."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from egmla_megatron.report.read import Record, RunMetrics
from egmla_megatron.report.times import parts_of_steps

__all__ = ["bars", "plot_comparison", "plot_loss", "plot_parts", "plot_throughput"]

# The Okabe-Ito palette without its yellow, which paper does not show; line styles differ as well.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#000000")
_STYLES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D")
_HATCHES = ("", "//", "..", "xx", "\\\\", "")
_BARS = 60  # of a plot of parts, at most
_RESTART = {"color": "#666666", "linestyle": ":", "linewidth": 1.2}
_SMOOTH_FROM = 200  # points from which a smoothed curve is drawn over the raw one


def plot_loss(metrics: RunMetrics, path: Path) -> None:
    """Draws training and validation loss over steps, with tokens above and restarts marked, to `path`."""
    figure, axes = _figure()
    steps, losses = _series(metrics.steps, "loss")
    _draw_loss(axes, steps, losses, _COLOURS[0], "-", "training")
    val_steps, val_losses = _series(metrics.evals, "val_loss")
    if val_steps:
        style = {"marker": "o", "markersize": 6, "linestyle": "--", "linewidth": 1.2}
        axes.plot(val_steps, val_losses, color=_COLOURS[1], label="validation", zorder=3, **style)  # type: ignore[arg-type]
    _mark_restarts(axes, _between_steps(metrics))
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(f"{metrics.name}: loss")
    _finish_step_axis(axes)
    _token_axis(axes, metrics)
    axes.legend(frameon=False)
    _save(figure, path)


def plot_throughput(metrics: RunMetrics, path: Path) -> None:
    """Draws tokens per second and peak memory over steps to `path`."""
    figure = Figure(figsize=(8, 6.5), dpi=150, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    steps, speeds = _series(metrics.steps, "tokens_per_second")
    above.plot(steps, speeds, color=_COLOURS[0], linewidth=1.0, label="every logged step")
    steady = _series(metrics.steady_steps(), "tokens_per_second")[1]
    if steady:
        median = statistics.median(steady)
        label = f"median {median:,.0f} (n={len(steady)}, without warm-up and profiled steps)"
        above.axhline(median, color=_COLOURS[1], linestyle="--", linewidth=1.4, label=label)
    above.set_ylabel("tokens per second, all ranks")
    above.set_title(f"{metrics.name}: throughput and memory")
    below.plot(*_series(metrics.steps, "peak_memory_mib"), color=_COLOURS[2], linewidth=1.4, label="peak so far")
    below.set_ylabel("peak memory per rank (MiB)")
    for axes in (above, below):
        _mark_restarts(axes, _between_steps(metrics))
        if math.isfinite(axes.dataLim.y1):  # else there is no such number in any line
            axes.set_ylim(0, 1.15 * axes.dataLim.y1)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        _dress(axes)
        axes.legend(loc="lower right", framealpha=0.9, edgecolor="none")
    _finish_step_axis(below)
    _save(figure, path)


def plot_parts(metrics: RunMetrics, path: Path) -> None:
    """Draws the parts of the steps on top of each other to `path`; nothing where no step has parts."""
    parts = parts_of_steps(metrics.steps)
    if not parts:
        return
    figure, axes = _figure()
    timed = [record["step"] for record in metrics.steps if _has_parts(record)]
    size = -(-len(timed) // _BARS)  # neighbouring steps in one bar
    chunks, edges, marks = bars(timed, [start.get("step", 0) for start in metrics.restarts], size)
    places = [(left + right) / 2 for left, right in pairwise(edges)]
    width = [0.9 * (right - left) for left, right in pairwise(edges)]
    floor = [0.0] * len(chunks)
    for index, (name, seconds) in enumerate(parts.items()):
        heights = [1e3 * statistics.fmean(seconds[chunk]) for chunk in chunks]
        colour, hatch = _COLOURS[index % len(_COLOURS)], _HATCHES[index % len(_HATCHES)]
        axes.bar(places, heights, width, floor, color=colour, hatch=hatch, edgecolor="white", linewidth=0, label=name)
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    _mark_restarts(axes, marks)
    axes.set_ylabel("ms of a step")
    axes.set_title(f"{metrics.name}: parts of a step" + (f" (means of {size} steps)" if size > 1 else ""))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    ordinary = statistics.median(floor)
    axes.set_ylim(0, min(1.05 * max(floor), 3 * ordinary) or 1.0)  # the first steps would dwarf all others
    _finish_step_axis(axes)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    _save(figure, path)


def bars(timed: Sequence[float], restarts: Sequence[float], size: int) -> tuple[list[slice], list[float], list[float]]:
    """(the steps of each bar, the edges of the bars, one more than bars, and where to mark the restarts: on edges).

    Args:
        timed: steps, ascending.
        restarts: steps done before each; no bar has steps from before and after one.
        size: steps in a bar, at most.
    """
    cuts = [bisect_right(timed, done) for done in restarts]
    bounds = sorted({0, len(timed), *cuts})
    chunks = [slice(at, min(at + size, end)) for first, end in pairwise(bounds) for at in range(first, end, size)]
    inner = [(timed[chunk.start - 1] + timed[chunk.start]) / 2 for chunk in chunks[1:]]
    half = (timed[1] - timed[0]) / 2 if len(timed) > 1 else 0.5
    edges = [timed[0] - half, *inner, timed[-1] + half]
    edge_at = dict(zip([*(chunk.start for chunk in chunks), len(timed)], edges, strict=True))
    return chunks, edges, [edge_at[cut] for cut in cuts]


def _has_parts(record: Record) -> bool:
    return bool(parts_of_steps([record]))


def plot_comparison(runs: Sequence[RunMetrics], path: Path, *, over: str) -> None:
    """Draws the losses of several runs to `path`, validation losses as points.

    over: tokens, or time (spent in steps, without evaluations and checkpoints).
    """
    figure, axes = _figure()
    at_seconds = [_seconds_at(metrics) for metrics in runs]
    longest = max((max(each.values()) for each in at_seconds if each), default=0.0)
    unit, word = (3600, "hours") if longest > 7200 else (60, "minutes") if longest > 120 else (1, "seconds")
    for index, metrics in enumerate(runs):
        colour, style = _COLOURS[index % len(_COLOURS)], _STYLES[index % len(_STYLES)]
        place = {step: seconds / unit for step, seconds in at_seconds[index].items()}
        if over == "tokens":
            place = _tokens_at(metrics)
        steps, losses = _series(metrics.steps, "loss")
        _draw_loss(axes, [place[step] for step in steps], losses, colour, style, metrics.name)
        evals = [record for record in metrics.evals if record["step"] in place]
        val_steps, val_losses = _series(evals, "val_loss")
        if val_steps:
            places = [place[step] for step in val_steps]
            marker = _MARKERS[index % len(_MARKERS)]
            label = f"{metrics.name}, validation"
            axes.plot(places, val_losses, marker, color=colour, markersize=8, markeredgecolor="white", label=label)
    axes.set_xlabel("tokens" if over == "tokens" else f"{word} in steps")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(f"loss of several runs over {over}")
    _dress(axes)
    axes.legend(frameon=False)
    _save(figure, path)


def _tokens_at(metrics: RunMetrics) -> dict[float, float]:
    return {record["step"]: record.get("tokens", math.nan) for record in metrics.steps}


def _seconds_at(metrics: RunMetrics) -> dict[float, float]:
    sums = accumulate(metrics.seconds_of_lines())
    return {record["step"]: seconds for record, seconds in zip(metrics.steps, sums, strict=True)}


def _figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
    return figure, figure.subplots()


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, format="png")


def _series(records: Sequence[Record], key: str) -> tuple[list[float], list[float]]:
    """Returns steps and values of the records whose `key` is a finite number."""
    points = [(record["step"], record[key]) for record in records if record.get(key) is not None]
    points = [(step, value) for step, value in points if math.isfinite(value)]
    return [step for step, _ in points], [value for _, value in points]


def _draw_loss(axes: Axes, x: Sequence[float], losses: Sequence[float], colour: str, style: str, label: str) -> None:
    """Draws a curve; a long one pale, with its running mean on top."""
    if len(losses) < _SMOOTH_FROM:
        axes.plot(x, losses, color=colour, linestyle=style, linewidth=1.5, label=label)
        return
    window = max(5, len(losses) // 50) | 1  # odd, to be centred
    axes.plot(x, losses, color=colour, linewidth=0.6, alpha=0.35)
    mean = _running_mean(losses, window)
    axes.plot(x, mean, color=colour, linestyle=style, linewidth=1.6, label=f"{label} (mean of {window} steps)")


def _running_mean(values: Sequence[float], window: int) -> list[float]:
    """Returns for each value the mean of those up to window // 2 away on either side; a trailing mean would lag."""
    sums = [0.0, *accumulate(values)]
    means = []
    for index in range(len(values)):
        first, end = max(0, index - window // 2), min(len(values), index + window // 2 + 1)
        means.append((sums[end] - sums[first]) / (end - first))
    return means


def _between_steps(metrics: RunMetrics) -> list[float]:
    """Where a curve over steps has its restarts."""
    return [start.get("step", 0) + 0.5 for start in metrics.restarts]


def _mark_restarts(axes: Axes, places: Sequence[float]) -> None:
    for index, place in enumerate(places):
        axes.axvline(place, label="restart" if index == 0 else None, **_RESTART)  # type: ignore[arg-type]


def _token_axis(axes: Axes, metrics: RunMetrics) -> None:
    """Adds tokens above the steps where every step consumed the same number."""
    last = metrics.steps[-1]
    per_step = last.get("tokens", 0) / last["step"] if last["step"] else 0
    if per_step <= 0:
        return

    def to_tokens(step: Any) -> Any:
        return step * per_step

    def to_steps(tokens: Any) -> Any:
        return tokens / per_step

    above = axes.secondary_xaxis("top", functions=(to_tokens, to_steps))
    above.set_xlabel("tokens")
    above.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))


def _short(tokens: float) -> str:
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(tokens) >= unit:
            return f"{tokens / unit:g} {letter}"
    return f"{tokens:g}"


def _finish_step_axis(axes: Axes) -> None:
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _dress(axes)


def _dress(axes: Axes) -> None:
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines["right"].set_visible(False)
