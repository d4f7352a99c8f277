"""What the plan said about a run, beside what was measured."""

from __future__ import annotations

from egmla_megatron.config.check import Layout
from egmla_megatron.errors import UserError
from egmla_megatron.report.cards import PEAK_BF16_FLOPS, Card, find_card, find_cluster
from egmla_megatron.report.distinct import with_measured_ids
from egmla_megatron.report.memory import unique_fraction
from egmla_megatron.report.rates import Workload
from egmla_megatron.report.read import Record, RunMetrics
from egmla_megatron.report.step_time import StepTime, estimate_step, missing_for_estimate
from egmla_megatron.report.summary import Summary, summarize
from egmla_megatron.report.tables import markdown

__all__ = ["memory_prediction", "prediction"]

_RESTS_ON = (
    "Speed as `tools/plan.py` estimates it for this card, with links of the data sheet: much slower than that means a "
    "slow link, a slow host (see the parts of a step) or a slow rank."
)


def prediction(metrics: RunMetrics) -> str:
    """Memory, speed and distinct ids of the last start as planned, as measured, and the error."""
    start = metrics.starts[-1] if metrics.starts else {}
    of_last = ", last start" if metrics.restarts else ""
    metrics = metrics.last_start()
    if not metrics.steps:
        return "The last start has no finished step."
    summary = summarize(metrics)
    rows: list[tuple[str, float | None, float | None, str, float]] = []
    memory = (start.get("predicted_memory_mib") or {}).get("total")
    rows.append((f"memory of the worst rank{of_last} (MiB)", memory, summary.peak_memory_mib, ",.0f", 1.0))
    rows += _speed(metrics, start, summary)
    origin = ""
    if metrics.config.model.gated:
        train = metrics.config.train
        tokens = train.micro_batch_size * train.seq_length // metrics.config.parallel.context
        of_data, origin = with_measured_ids(metrics.config)
        distinct = unique_fraction(tokens, of_data.data.unique_fractions)
        rows.append(("distinct ids of a micro-batch (%)", distinct, summary.unique_id_fraction, ".1f", 1e-2))
    known = [row for row in rows if row[1] is not None and row[2] is not None]
    if not known:
        return "Nothing was predicted that this run measured: speed is planned for GPUs whose data sheet is known."
    cells = [
        [name, f"{planned / unit:{form}}", f"{real / unit:{form}}", f"{planned / real - 1:+.1%}"]
        for name, planned, real, form, unit in known
        if planned is not None and real is not None
    ]
    note = f"\n\nPredicted distinct ids: {origin}." if origin else ""
    note += "" if len(known) < 3 else f"\n\n{_RESTS_ON}"
    if metrics.config.train.fp8 != "none":
        note += "\n\nSpeed in FP8 is not estimated; memory is."
    return markdown(["", "predicted", "measured", "error"], cells) + note


def _speed(
    metrics: RunMetrics, start: Record, summary: Summary
) -> list[tuple[str, float | None, float | None, str, float]]:
    found = _estimate(metrics, start)
    if found is None:
        return []
    step, card = found
    planned = Workload.of(metrics.config).rates(step.step_s, int(start["world_size"]), card.bf16_tflops * 1e12)
    real = {
        name: spread.median if spread else None
        for name, spread in (
            ("rate", summary.tokens_per_second),
            ("step", summary.step_time_s),
            ("flops", summary.tflops_per_second_per_rank),
            ("mfu", summary.mfu),
        )
    }
    return [
        ("tokens/s, all ranks", planned.tokens_per_second, real["rate"], ",.0f", 1.0),
        (f"step time (ms), limited by {step.limited_by}", step.step_s, real["step"], ",.1f", 1e-3),
        ("model TFLOP/s per rank", planned.tflops_per_second_per_rank, real["flops"], ",.1f", 1.0),
        ("MFU (%)", planned.mfu, real["mfu"], ".1f", 1e-2),
    ]


def _estimate(metrics: RunMetrics, start: Record) -> tuple[StepTime, Card] | None:
    """None for a CPU, a card without a data sheet here, or a log of another version."""
    if not {"layout", "world_size", "device", "implementation", "kernels"} <= set(start):
        return None
    name = next((name for name in PEAK_BF16_FLOPS if name in str(start["device"])), "").lower()
    try:
        card = find_card(name, None, None)
        layout = Layout(**start["layout"])
    except (UserError, TypeError):
        return None
    cluster = find_cluster(card, layout.world_size, None, None, None)
    if missing_for_estimate(metrics.config, layout, card, cluster):
        return None
    te, triton = start["implementation"] == "te", start["kernels"] == "triton"
    return estimate_step(metrics.config, layout, card, cluster, te=te, triton=triton), card


def memory_prediction(metrics: RunMetrics) -> str:
    """Memory of the rank that needs most by part: the parts add up to what was predicted. Empty where nothing was."""
    start = metrics.starts[-1] if metrics.starts else {}
    parts: dict[str, float] | None = start.get("predicted_memory_mib")
    if not parts:
        return ""
    rows = [[name.replace("_", " "), f"{size:,.0f}"] for name, size in parts.items()]
    return markdown(["predicted memory of the worst rank", "MiB"], rows)
