"""What an operator asks of a run: how far, how fast, how often restarted, is it alive?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from egmla_megatron.checkpoint.manifest import complete_checkpoints, damaged_checkpoints, step_of
from egmla_megatron.config.load import load_config
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.errors import UserError
from egmla_megatron.launching.ledger import Launch, RunTail, count_starts, read_launches, read_tail
from egmla_megatron.train.lock import is_held
from egmla_megatron.train.sinks import format_duration

__all__ = ["format_status", "read_status"]

Status = dict[str, Any]
_RECENT = 50  # steps whose median time counts
_SILENT_STEPS, _SILENT_S = 20, 300.0  # without a record for longer than both: say so


def read_status(run_dir: str | Path, now: float | None = None) -> Status:
    """Everything known of a run, as plain data. Times in seconds, `unix` ones since 1970.

    Raises:
        UserError: no run is there.
    """
    folder = Path(run_dir)
    config = folder / "config.yaml"
    if not config.is_file():
        raise UserError(f"RUN_DIR: got {folder}, which holds no config.yaml of a run; give the folder named by run.dir")
    cfg, tail, launches = load_config(config), read_tail(folder), read_launches(folder)
    now = time.time() if now is None else now
    steps, step_s = _surviving(tail), _step_seconds(cfg, tail)
    checkpoints = complete_checkpoints(folder / "checkpoints")
    step = _step(tail, [step_of(path) for path in checkpoints])
    per_step = cfg.train.global_batch_size * cfg.train.seq_length
    remaining = max(0, cfg.total_steps - step)
    return {
        "name": cfg.run.name,
        "run_dir": str(folder),
        "state": _state(folder, tail, launches, step_s, now),
        "step": step,
        "total_steps": cfg.total_steps,
        "tokens": step * per_step,
        "total_tokens": cfg.total_steps * per_step,
        "step_time_s": step_s,
        "tokens_per_second": per_step / step_s if step_s else None,
        "eta_s": remaining * step_s if step_s else None,
        "silent_s": now - tail.last_unix_s if tail.last_unix_s else None,
        "losses": [{"step": record["step"], "loss": record["loss"]} for record in steps[-5:]],
        "val": None if not tail.evals else {key: tail.evals[-1][key] for key in ("step", "val_loss", "val_ppl")},
        "skipped_steps": sum(bool(record.get("skipped")) for record in steps),
        "restarts": max(0, count_starts(folder) - 1),  # as in the report: starts of training behind the first
        "launches_recorded": len(launches),  # those too that ended in their checks
        "launches": [asdict(launch) for launch in launches[-5:]],
        "checkpoints": [step_of(path) for path in checkpoints],
        "damaged_checkpoints": {path.name: why for path, why in damaged_checkpoints(folder / "checkpoints").items()},
        "next_checkpoint": _next_checkpoint(cfg, step, step_s, tail, now),
    }


def _step(tail: RunTail, checkpoints: list[int]) -> int:
    """Steps done: of the newest start, not of one whose work was lost."""
    if not tail.starts and not tail.steps:
        return max(checkpoints, default=0)
    begun = tail.starts[-1]["unix_time_s"] if tail.starts else 0.0
    from_step = tail.starts[-1]["step"] if tail.starts else 0
    return max((record["step"] for record in tail.since(begun).steps), default=from_step)


def _surviving(tail: RunTail) -> list[dict[str, Any]]:
    """Steps without those that a later start went back behind."""

    def lost(record: dict[str, Any]) -> bool:
        return any(
            start["unix_time_s"] > record["unix_time_s"] and start["step"] < record["step"] for start in tail.starts
        )

    return [record for record in tail.steps if not lost(record)]


def _step_seconds(cfg: RunConfig, tail: RunTail) -> float | None:
    """Median time of recent steps, without the first ones after a start."""
    cold = [start["step"] for start in tail.starts]
    warmup = cfg.logging.warmup_steps
    warm = [record for record in tail.steps if not any(s < record["step"] <= s + warmup for s in cold)]
    times = [record["step_time_s"] for record in (warm or tail.steps)[-_RECENT:]]
    return statistics.median(times) if times else None


def _state(folder: Path, tail: RunTail, launches: list[Launch], step_s: float | None, now: float) -> str:
    launch = launches[-1] if launches else None
    mine = tail.since(launch.started_unix_s) if launch else tail
    if launch is not None and not launch.is_open:
        return f"ended: {launch.outcome}" + (f" (exit code {launch.code})" if launch.code else "")
    if mine.ends and mine.last_unix_s == mine.ends[-1]["unix_time_s"]:
        return f"ended: {mine.ends[-1]['reason']}"
    if mine.starts and is_held(folder) is False:
        return "not running: it ended without a word (a crash, a kill, a lost node)"
    silent = now - max(tail.last_unix_s, launch.started_unix_s if launch else 0.0)
    if silent > max(_SILENT_S, _SILENT_STEPS * (step_s or 0.0)):
        return f"no sign of life for {format_duration(silent)}: dead, stuck, or waiting in the queue"
    return "running" if mine.starts else "starting"


def _next_checkpoint(cfg: RunConfig, step: int, step_s: float | None, tail: RunTail, now: float) -> Status | None:
    """The step of the next save by interval and the seconds until then, whichever of step and time comes first."""
    every, minutes = cfg.checkpoint.interval_steps, cfg.checkpoint.interval_minutes
    ways = []
    if every:
        at = min((step // every + 1) * every, cfg.total_steps)
        ways.append({"step": at, "in_s": (at - step) * step_s if step_s else None})
    elif not minutes:
        ways.append({"step": cfg.total_steps, "in_s": (cfg.total_steps - step) * step_s if step_s else None})
    if minutes:
        since = [record["unix_time_s"] for record in (*tail.starts[-1:], *tail.checkpoints[-1:])]
        left = max(0.0, max(since, default=now) + 60 * minutes - now)
        ways.append({"step": step + round(left / step_s) if step_s else None, "in_s": left})
    if step >= cfg.total_steps:
        return None
    return min(ways, key=lambda way: float("inf") if way["in_s"] is None else way["in_s"])


def _date(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_s))


def _tokens(count: int) -> str:
    return f"{count / 1e9:.3f} G" if count >= 1e8 else f"{count / 1e6:.3f} M"


def format_status(status: Mapping[str, Any], now: float | None = None) -> str:
    """Lines for a person."""
    now = time.time() if now is None else now
    step, total = status["step"], status["total_steps"]
    silent = status["silent_s"]
    lines = {
        "run": f"{status['name']}, {status['run_dir']}",
        "state": status["state"] + (f", last record {format_duration(silent)} ago" if silent is not None else ""),
        "progress": f"step {step:,} of {total:,} ({100 * step / total:.1f}%), "
        f"{_tokens(status['tokens'])} of {_tokens(status['total_tokens'])} tokens",
        "speed": _speed(status, now),
        "losses": "  ".join(f"{r['step']}: {_number(r['loss'])}" for r in status["losses"]) or "none yet",
    }
    if status["val"]:
        lines["validation"] = f"{status['val']['step']}: loss {_number(status['val']['val_loss'])}"
    if status["skipped_steps"]:
        lines["skipped"] = f"{status['skipped_steps']} recent steps were not finite"
    kept = ", ".join(str(step) for step in status["checkpoints"]) or "none yet"
    lines["checkpoints"] = f"{kept}; next {_next(status['next_checkpoint'])}"
    if status["damaged_checkpoints"]:
        lines["damaged"] = "; ".join(f"{name}: {why}" for name, why in status["damaged_checkpoints"].items())
    recorded = status["launches_recorded"]
    lines["restarts"] = str(status["restarts"]) + (f" (launches recorded: {recorded})" if recorded else "")
    text = [f"{name:<12} {value}" for name, value in lines.items()]
    return "\n".join(text + [_launch_line(launch) for launch in status["launches"]])


def _speed(status: Mapping[str, Any], now: float) -> str:
    if not status["step_time_s"]:
        return "no step yet"
    rate = f"{status['step_time_s'] * 1e3:,.0f} ms a step, {status['tokens_per_second']:,.0f} tokens/s"
    if not status["eta_s"] or not status["state"].startswith(("running", "starting")):
        return rate
    return f"{rate}; {format_duration(status['eta_s'])} to go, done {_date(now + status['eta_s'])} if it runs on"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _next(way: Mapping[str, Any] | None) -> str:
    if way is None:
        return "none: the run is complete"
    where = "" if way["step"] is None else f"at step {way['step']:,}"
    when = "" if way["in_s"] is None else f" in {format_duration(way['in_s'])}"
    return (where + when).strip()


def _launch_line(launch: Mapping[str, Any]) -> str:
    nodes = launch["nodes"]
    where = ", ".join(nodes[:4]) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")
    end = (
        f"{launch['outcome']} at step {launch['reached']}" + (f": {launch['said']}" if launch["said"] else "")
        if launch["ended_unix_s"]
        else "open"
    )
    return (
        f"  {_date(launch['started_unix_s'])} job {launch['job']}, restart {launch['restart']}, "
        f"{launch['ranks']} ranks on {where}, from step {launch['from_step']}: {end}"
    )
