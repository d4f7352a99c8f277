"""Markdown tables of one run and of several beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from egmla_megatron.config.schema import RunConfig
from egmla_megatron.model.count import count_parameters, kv_cache_elements_per_token
from egmla_megatron.report.read import RunMetrics
from egmla_megatron.report.summary import LastLoss, Spread, Summary

__all__ = ["NONE", "configuration", "markdown", "restarts", "results", "throughput"]

NONE = "–"  # where there is no value


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table; the first column is text, the others are aligned right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def configuration(metrics: RunMetrics) -> str:
    """What was trained, on what, and how."""
    cfg = metrics.config
    model, parallel, train = cfg.model, cfg.parallel, cfg.train
    count = count_parameters(model)
    start = metrics.starts[-1] if metrics.starts else {}
    chunks = f" x {parallel.virtual_pipeline} chunks" if parallel.virtual_pipeline > 1 else ""
    layout = f"TP {parallel.tensor}, PP {parallel.pipeline}{chunks}, CP {parallel.context}, "
    layout += f"gate group {parallel.gate_group}"
    rows = [
        ["model", f"{model.name}: {model.num_layers} layers, hidden {model.hidden_size}"],
        ["attention", _attention(cfg)],
        ["active parameters", f"{count.active / 1e6:,.1f} M"],
        ["gating-table parameters", f"{count.gate_tables / 1e6:,.1f} M"],
        ["cache, elements per token", f"{kv_cache_elements_per_token(model):,d}"],
        ["ranks", f"{start.get('world_size', NONE)} ({layout})"],
        ["device", str(start.get("device", NONE))],
        ["precision", train.precision],
        ["batch", f"{train.global_batch_size} x {train.seq_length} tokens"],
        ["optimizer", f"AdamW, peak lr {cfg.optimizer.lr:g}, {cfg.optimizer.schedule}"],
        ["planned steps", f"{cfg.total_steps:,d}"],
        ["seed", str(cfg.run.seed)],
    ]
    return markdown(["configuration", "value"], rows)


def results(summary: Summary) -> str:
    """Losses and what they cost."""
    best = NONE
    if summary.best_val_loss is not None:
        best = f"{summary.best_val_loss:.4f} (step {summary.best_val_step})"
    first = "first step" if summary.first_step == 1 else f"step {summary.first_step:,d}, the first with a line"
    rows = [
        ["steps done", f"{summary.steps:,d}"],
        ["tokens", f"{summary.tokens:,d}"],
        [f"training loss, {first} (nats/token)", _loss(summary.first_loss)],
        ["training loss, last step (nats/token)", _last(summary.last_loss)],
        ["training loss, mean of the last 10 steps with a line (nats/token)", _loss(summary.mean_last_loss)],
        ["validation loss, last (nats/token)", NONE if summary.last_val_loss is None else _last(summary.last_val_loss)],
        ["validation perplexity, last", _number(summary.val_ppl, ".2f")],
        ["validation loss, best (nats/token)", best],
        ["skipped steps (NaN or Inf)", str(summary.skipped)],
        ["time in steps (s)", f"{summary.training_time_s:,.1f}"],
        ["peak memory of the worst rank (MiB)", _peak(summary)],
        ["reserved by torch's allocator (MiB)", _number(summary.reserved_memory_mib, ",.0f")],
        ["distinct ids of a micro-batch", _number(summary.unique_id_fraction, ".1%")],
    ]
    return markdown(["result", "value"], rows)


def throughput(summary: Summary) -> str:
    """Speed as medians with sample size and quartiles."""
    measures: list[tuple[str, Spread | None, str]] = [
        ("tokens/s, all ranks", summary.tokens_per_second, ",.0f"),
        ("tokens/s per rank", summary.tokens_per_second_per_rank, ",.0f"),
        ("step time (s)", summary.step_time_s, ".4f"),
        ("model TFLOP/s per rank", summary.tflops_per_second_per_rank, ".4g"),
        ("MFU", summary.mfu, ".1%"),
        ("checkpoint (s)", summary.checkpoint_s, ".2f"),
    ]
    rows = [
        [name, f"{sample.median:{form}}", f"{sample.low:{form}}", f"{sample.high:{form}}", str(sample.n)]
        for name, sample, form in measures
        if sample
    ]
    return markdown(["measure", "median", "first quartile", "third quartile", "n"], rows)


def restarts(metrics: RunMetrics) -> str:
    """Every start of the run, one line each; says so when there was only one."""
    if not metrics.restarts:
        return "The run was not interrupted."
    rows = []
    for index, start in enumerate(metrics.starts):
        source = start.get("resumed_from")
        rows.append(
            [
                str(index + 1),
                str(start.get("step", 0)),
                NONE if source is None else str(source),
                str(start.get("world_size", NONE)),
                _time(start.get("unix_time_s")),
            ]
        )
    table = markdown(["start", "steps done before", "resumed from", "ranks", "time (UTC)"], rows)
    lost = f"{table}\n\nSteps whose work was lost to a restart: {metrics.lost_steps}."
    damaged = dict.fromkeys(each for start in metrics.starts for each in start.get("passed_over") or ())
    return lost + "".join(f"\n\nDamaged and passed over: {each}." for each in damaged)


def _attention(cfg: RunConfig) -> str:
    model = cfg.model
    if model.attention == "mha":
        return f"MHA, {model.num_attention_heads} heads of {model.v_head_dim}"
    latent = f"{model.num_attention_heads} heads, latent {model.kv_lora_rank}"
    if not model.gated:
        return f"MLA, {latent}"
    norm = "with" if model.gate_norm else "without"
    return f"EG-MLA, {latent}, gate {model.gate} of {model.kv_emb_dim} dimensions {norm} norm"


def _peak(summary: Summary) -> str:
    where = "" if summary.peak_memory_rank is None else f" (rank {summary.peak_memory_rank})"
    return _number(summary.peak_memory_mib, ",.0f") + where


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _last(loss: LastLoss) -> str:
    """The last loss; where it is not finite, also the last that was, which must not pass for it."""
    if loss.value is not None or loss.finite is None:
        return _loss(loss.value)
    return f"not finite; at step {loss.finite_step:,d}, the last that was: {loss.finite:.4f}"


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else f"{value:{form}}"


def _time(unix_time_s: float | None) -> str:
    if unix_time_s is None:
        return NONE
    return datetime.fromtimestamp(unix_time_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
