"""Where metrics go: console, JSON lines, TensorBoard, wandb. The same names everywhere, those of train/events.py."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from egmla_megatron.config.load import to_dict
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.report.peaks import peak_of

__all__ = ["NOTICED", "Sinks", "format_duration", "open_sinks"]

_STANDS_OUT = 1.2  # the slowest rank's work in a step / the fastest one's, from which the console names it
NOTICED = 0.05  # of the step, by which it must be behind as well


class Sink(Protocol):
    """Takes one event: its kind, and values by name, as train/events.py lists them."""

    def write(self, kind: str, event: Mapping[str, Any]) -> None:
        """Record the event."""

    def close(self) -> None:
        """Flush and release."""


def format_duration(seconds: float) -> str:
    """h:mm:ss."""
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _ranks(layout: Mapping[str, Any]) -> str:
    """A layout in a few words."""
    chunks = f" x {layout['vp']} chunks" if layout["vp"] > 1 else ""
    context = f" CP {layout['cp']}" if layout["cp"] > 1 else ""
    return f"TP {layout['tp']} PP {layout['pp']}{chunks}{context} DP {layout['dp']} gate group {layout['gate_group']}"


def _straggler(e: Mapping[str, Any]) -> str:
    """Who it is, where it stands out."""
    slow, fast = e["slowest_rank_busy_s"], e["fastest_rank_busy_s"]
    if slow is None or slow <= max(_STANDS_OUT * fast, fast + NOTICED * e["step_time_s"]):
        return ""
    return (
        f"  slowest_rank {e['slowest_rank']} on {e['slowest_node']}, busy {slow * 1e3:.0f} ms, fastest {fast * 1e3:.0f}"
    )


class Console:
    """One aligned line per event on stdout."""

    def write(self, kind: str, event: Mapping[str, Any]) -> None:
        """Print it."""
        line = getattr(self, f"_{kind}", None)
        if line is not None:
            print(line(event), flush=True)

    def close(self) -> None:
        """Nothing to release."""

    @staticmethod
    def _start(e: Mapping[str, Any]) -> str:
        resumed = f"resuming {e['resumed_from']}" if e["resumed_from"] else "from the beginning"
        return (
            f"start    step {e['step']} of {e['total_steps']}, {resumed}; {e['world_size']} x {e['device']}, "
            f"layers by {e['implementation']}, attention {e['attention_backend']}, kernels {e['kernels']}, "
            + ("passes as one CUDA graph, " if e["cuda_graph"] else "")
            + f"{e['active_params'] / 1e6:.1f}M active + {e['gate_table_params'] / 1e6:.1f}M table parameters, "
            + _ranks(e["layout"])
        )

    @staticmethod
    def _step(e: Mapping[str, Any]) -> str:
        mfu = f"  mfu {100 * e['mfu']:5.1f}%" if e["mfu"] is not None else ""
        return (
            f"step {e['step']:>7}/{e['total_steps']}  loss {e['loss']:8.5f}  grad_norm {e['grad_norm']:8.4f}  "
            f"lr {e['lr']:.3e}  step_time {e['step_time_s'] * 1e3:8.1f} ms  "
            f"tokens_per_second {e['tokens_per_second']:>9,.0f}{mfu}  "
            f"peak_memory {e['peak_memory_mib']:>7,.0f} MiB  eta {format_duration(e['eta_s'])}"
            + _straggler(e)
            + ("" if not e["skipped"] else "  SKIPPED: not finite")
        )

    @staticmethod
    def _eval(e: Mapping[str, Any]) -> str:
        return f"eval {e['step']:>7}  val_loss {e['val_loss']:8.5f}  val_ppl {e['val_ppl']:9.3f}  {e['seconds']:.1f} s"

    @staticmethod
    def _checkpoint(e: Mapping[str, Any]) -> str:
        return f"saved    {e['path']}  {e['seconds']:.1f} s"

    @staticmethod
    def _profile(e: Mapping[str, Any]) -> str:
        return f"profiled {e['path']}"

    @staticmethod
    def _end(e: Mapping[str, Any]) -> str:
        rate, peak = e["tokens_per_second"], peak_of(dict(e))
        phases = ("training", "warmup", "evaluation", "checkpoint", "profile", "total")
        return (
            f"end      step {e['step']}: {e['reason']}"
            + (f"; skipped_steps {e['skipped_steps']}, not finite" if e["skipped_steps"] else "")
            + (f"; tokens_per_second {rate:,.0f}" if rate else "")
            + (f"; peak_memory {peak.mib:,.0f} MiB (rank {peak.rank})" if peak else "")
            + "; "
            + ", ".join(f"{name} {e[f'{name}_s']:.1f} s" for name in phases if e[f"{name}_s"])
        )


class JsonLines:
    """RUN_DIR/metrics.jsonl, appended over restarts; a number that JSON has no word for becomes null."""

    def __init__(self, path: Path) -> None:
        torn = path.is_file() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self.file = open(path, "a", buffering=1)  # noqa: SIM115 - closed by close()
        if torn:  # a killed run may leave half a line: do not glue the next one to it
            self.file.write("\n")

    def write(self, kind: str, event: Mapping[str, Any]) -> None:
        """Append one object."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in event.items()}
        self.file.write(json.dumps({"kind": kind, "unix_time_s": time.time(), **clean}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def _scalars(event: Mapping[str, Any]) -> dict[str, float]:
    return {
        key: float(value)
        for key, value in event.items()
        if isinstance(value, int | float) and key not in ("step", "total_steps")
    }


class TensorBoard:
    """RUN_DIR/tensorboard. One record an event: a call of add_scalar for every name would cost a step milliseconds."""

    def __init__(self, path: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard.writer import FileWriter

        self.summary: Any = Summary
        self.event, self.log = Event, SessionLog
        self.writer: Any = FileWriter(str(path))

    def write(self, kind: str, event: Mapping[str, Any]) -> None:
        """Record steps and evaluations. A start takes back what an earlier one had done beyond it."""
        if kind == "start":
            began = self.event(session_log=self.log(status=self.log.START))
            self.writer.add_event(began, event["step"] + 1)
        if kind in ("step", "eval"):
            values = [self.summary.Value(tag=name, simple_value=value) for name, value in _scalars(event).items()]
            self.writer.add_summary(self.summary(value=values), event["step"])

    def close(self) -> None:
        """Flush."""
        self.writer.close()


class Wandb:
    """Weights & Biases, offline unless asked; the run continues under the same id after a restart."""

    def __init__(self, cfg: RunConfig) -> None:
        import secrets

        import wandb

        identity = Path(cfg.run.dir) / "wandb_id"
        if not identity.is_file():
            identity.write_text(secrets.token_hex(4))
        self.run = wandb.init(
            project=cfg.logging.wandb_project,
            name=cfg.run.name,
            id=identity.read_text().strip(),
            resume="allow",
            mode=cfg.logging.wandb,
            dir=cfg.run.dir,
            config=to_dict(cfg),
            settings=wandb.Settings(quiet=True),  # its summary of curves would be the last page of every job's log
        )

    def write(self, kind: str, event: Mapping[str, Any]) -> None:
        """Record steps and evaluations."""
        if kind in ("step", "eval"):
            self.run.log(_scalars(event), step=event["step"])

    def close(self) -> None:
        """Finish the run."""
        self.run.finish()


class Sinks:
    """All sinks of rank 0; on other ranks there are none and every call does nothing.

    A sink that fails (disk full, no network, a closed terminal) is named once and tried again with the next event:
    logging must not cost a training run.

    Args:
        sinks: take every event at once.
        slow: take it with the next `flush`, which is called when the host has nothing better to do.
    """

    def __init__(self, sinks: Sequence[Sink], slow: Sequence[Sink] = ()) -> None:
        self.sinks, self.slow = sinks, slow
        self.waiting: list[tuple[str, Mapping[str, Any]]] = []
        self.warned: set[str] = set()

    def write(self, kind: str, event: Mapping[str, Any]) -> None:
        """Send one event to every sink."""
        self._send(self.sinks, kind, event)
        if self.slow:
            self.waiting.append((kind, event))

    def flush(self) -> None:
        """Send what the slow sinks have not seen."""
        waiting, self.waiting = self.waiting, []
        for kind, event in waiting:
            self._send(self.slow, kind, event)

    def close(self) -> None:
        """Flush and close every sink."""
        self.flush()
        for sink in (*self.sinks, *self.slow):
            try:
                sink.close()
            except Exception as error:
                self._warn(sink, error)

    def _send(self, sinks: Sequence[Sink], kind: str, event: Mapping[str, Any]) -> None:
        for sink in sinks:
            try:
                sink.write(kind, event)
            except Exception as error:  # wandb and TensorBoard raise many kinds
                self._warn(sink, error)

    def _warn(self, sink: Sink, error: Exception) -> None:
        name = type(sink).__name__
        if name in self.warned:
            return
        self.warned.add(name)
        with contextlib.suppress(OSError):  # stderr may be the closed terminal
            print(f"warning: {name} cannot record: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def open_sinks(cfg: RunConfig, *, is_first: bool) -> Sinks:
    """Open what `logging` asks for. wandb problems (no account, no network) are named and do not stop a run."""
    if not is_first:
        return Sinks([])
    folder = Path(cfg.run.dir)
    slow: list[Sink] = []
    if cfg.logging.tensorboard:
        slow.append(TensorBoard(folder / "tensorboard"))
    if cfg.logging.wandb != "disabled":
        try:
            slow.append(Wandb(cfg))
        except Exception as error:  # wandb raises many kinds; logging must not cost a training run
            print(f"warning: wandb is not recording: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    return Sinks([Console(), JsonLines(folder / "metrics.jsonl")], slow)
