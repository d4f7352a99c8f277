"""Where the time of a run went: parts of a step, evaluations, checkpoints, stragglers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from egmla_megatron.report.read import Record, RunMetrics
from egmla_megatron.report.summary import finite, spread
from egmla_megatron.report.tables import markdown

__all__ = ["PARTS", "parts_of_steps", "spent", "split", "stragglers"]

# name in a step's record -> how it is called here; they add up to the step on the device
PARTS = {
    "time_data_s": "data",
    "time_forward_backward_s": "forward and backward",
    "time_exchange_s": "exchange of gate embeddings",
    "time_gradient_sync_s": "gradient reduction",
    "time_optimizer_s": "optimizer",
}
_SPENT = {
    "training_s": "steps that count",
    "warmup_s": "warm-up steps",
    "evaluation_s": "evaluations",
    "checkpoint_s": "checkpoints",
    "profile_s": "profiled steps",
}


def parts_of_steps(steps: Sequence[Record]) -> dict[str, list[float]]:
    """Part -> seconds in each of the steps that have parts, with the rest of the step; a part never measured is left
    out, one that a single step lacks is 0 there."""
    timed = [step for step in steps if finite([step], "step_time_s") and any(finite([step], key) for key in PARTS)]
    found = {
        name: [(finite([step], key) or [0.0])[0] for step in timed] for key, name in PARTS.items() if finite(timed, key)
    }
    if found:
        sums = [sum(each) for each in zip(*found.values(), strict=True)]
        found["rest"] = [max(0.0, step["step_time_s"] - done) for step, done in zip(timed, sums, strict=True)]
    return found


def split(metrics: RunMetrics) -> str:
    """Parts of the steps after warm-up; empty where no step has any."""
    parts = parts_of_steps(metrics.steady_steps())
    if not parts:
        return ""
    whole = sum(map(sum, parts.values()))
    rows = []
    for name, seconds in parts.items():
        sample = spread(seconds)
        assert sample is not None
        quartiles = [f"{each * 1e3:,.2f}" for each in (sample.median, sample.low, sample.high)]
        rows.append([name, *quartiles, f"{sum(seconds) / whole:.1%}" if whole else "–", str(sample.n)])
    return markdown(["part of a step (ms)", "median", "first quartile", "third quartile", "share of all", "n"], rows)


def spent(metrics: RunMetrics) -> str:
    """Seconds of every kind, over all starts: as each end said, or else from the lines of steps and evaluations."""
    said = [end for end in metrics.ends if finite([end], "training_s")]
    if said and len(said) == len(metrics.starts):
        seconds = {name: sum(finite(said, key)) for key, name in _SPENT.items() if finite(said, key)}
        seconds = {name: each for name, each in seconds.items() if each >= 0.05}  # what would read 0.0
        origin = "As every start said when it ended."
    else:
        seconds, origin = _from_lines(metrics), "From the lines of steps, evaluations and checkpoints."
    total = sum(seconds.values())
    rows = [[name, f"{each:,.1f}", f"{each / total:.1%}" if total else "–"] for name, each in seconds.items()]
    return markdown(["time", "s", "share"], [*rows, ["sum", f"{total:,.1f}", ""]]) + f"\n\n{origin}"


def _from_lines(metrics: RunMetrics) -> dict[str, float]:
    steady = {step["step"] for step in metrics.steady_steps()}
    times = {True: 0.0, False: 0.0}
    for step, seconds in zip(metrics.steps, metrics.seconds_of_lines(), strict=True):
        times[step["step"] in steady] += seconds if math.isfinite(seconds) else 0.0
    return {
        "steps that count": times[True],
        "warm-up and profiled steps": times[False],
        "evaluations": sum(finite(metrics.evals, "seconds")),
        "checkpoints (with what was written in the background)": sum(finite(metrics.checkpoints, "seconds")),
    }


def stragglers(metrics: RunMetrics, most: int = 5) -> str:
    """Ranks by how often they were the slowest; empty where that was not measured."""
    steps = [step for step in metrics.steady_steps() if step.get("slowest_rank") is not None]
    if not steps:
        return ""
    places = Counter((step["slowest_rank"], step.get("slowest_node") or "–") for step in steps)
    rows = []
    for (rank, node), times in places.most_common(most):
        mine = [step for step in steps if step["slowest_rank"] == rank]
        behind = [
            step["slowest_rank_busy_s"] / step["fastest_rank_busy_s"] - 1
            for step in mine
            if finite([step], "slowest_rank_busy_s") and (finite([step], "fastest_rank_busy_s") or [0.0])[0] > 0
        ]
        late = f"{fmean(behind):+.1%}" if behind else "–"
        rows.append([str(rank), str(node), f"{times / len(steps):.0%}", late])
    return markdown(["slowest rank", "node", "of the steps", "busy longer than the fastest"], rows)
