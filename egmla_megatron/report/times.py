"""Where the time of a run went: parts of a step, evaluations, checkpoints, stragglers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import median

from egmla_megatron.report.read import Record, RunMetrics
from egmla_megatron.report.summary import finite, spread
from egmla_megatron.report.tables import markdown
from egmla_megatron.train.sinks import NOTICED

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
_UNLIKELY = 0.01  # probability from which on a straggler may be chance
_RESTARTS = "restarts (standing still, starting, repeating steps)"


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
    """Seconds of every kind, over all starts: as each end said, or else from the lines of steps and evaluations (the
    ends count repeated steps twice)."""
    said = [end for end in metrics.ends if finite([end], "training_s")]
    if said and len(said) == len(metrics.starts) and not metrics.lost_steps:
        seconds = {name: sum(finite(said, key)) for key, name in _SPENT.items() if finite(said, key)}
        seconds = {name: each for name, each in seconds.items() if each >= 0.05}  # what would read 0.0
        origin = "As every start said when it ended."
    else:
        seconds, origin = _from_lines(metrics), "From the lines of steps, evaluations and checkpoints."
    if metrics.restarts:
        seconds[_RESTARTS] = metrics.restart_s
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


def stragglers(metrics: RunMetrics) -> str:
    """Ranks that are slower than the others; two sentences where none is, empty where that was not measured.

    Some rank is always the slowest. It is named where that is more than noise: chance would choose any of equal ranks
    so often in less than 1% of such runs, and it is busy for longer than the fastest, in the median, by at least
    `NOTICED` of a step, as the console wants it, too: on sound machines steps scatter by as much (p10 to p90 of the
    75 rows in tools/records: 7% in the median).
    """
    steps = [step for step in metrics.steady_steps() if _lag(step) is not None]
    if not steps:
        return ""
    step_s = median(finite(steps, "step_time_s") or [math.nan])
    ranks = max((int(start.get("world_size") or 1) for start in metrics.starts), default=1)
    places = Counter((step["slowest_rank"], step.get("slowest_node") or "–") for step in steps)
    rows, named = [], []
    for (rank, node), times in places.most_common():
        lag = median(_lag(step) or 0.0 for step in steps if step["slowest_rank"] == rank)
        behind = f"{lag * 1e3:,.1f} ms, {lag / step_s:+.1%}"
        rows.append([str(rank), str(node), f"{times / len(steps):.0%}", behind])
        if _chance(times, len(steps), ranks) < _UNLIKELY and lag >= NOTICED * step_s:
            named.append(rows[-1])
    if named:
        return markdown(["slowest rank", "node", "of the steps", "busy longer than the fastest, of a step"], named)
    rank, node, share, behind = rows[0]
    return (
        f"No rank stands out: the slowest most often is {rank} on {node}, in {share} of the steps ({behind}). One is "
        f"named from {NOTICED:.0%} of a step on, where chance chooses it so often in less than {_UNLIKELY:.0%} of runs."
    )


def _chance(times: int, steps: int, ranks: int) -> float:
    """Bound (Chernoff's) of the probability that one of so many equal ranks is the slowest in `times` of the steps."""
    share, fair = times / steps, 1 / ranks
    if share <= fair:
        return 1.0
    rest = (1 - share) * math.log((1 - share) / (1 - fair)) if share < 1 else 0.0
    return min(1.0, ranks * math.exp(-steps * (share * math.log(share / fair) + rest)))


def _lag(step: Record) -> float | None:
    """Seconds for which the slowest rank was busy longer than the fastest."""
    slow, fast = (finite([step], key) for key in ("slowest_rank_busy_s", "fastest_rank_busy_s"))
    return slow[0] - fast[0] if slow and fast and step.get("slowest_rank") is not None else None
