"""RUN_DIR/launches.jsonl: every launch of a run and how it ended, appended over restarts by the launch scripts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from egmla_megatron.errors import UserError

__all__ = ["FILE", "Launch", "RunTail", "count_starts", "read_launches", "read_tail", "record_end", "record_start"]

FILE = "launches.jsonl"
_TAIL_BYTES = 1 << 20  # of metrics.jsonl: thousands of steps


@dataclass(frozen=True)
class Launch:
    """One start of a run by a launch script."""

    job: str  # Slurm's job id, or host and pid
    restart: int  # how often Slurm has restarted that job before
    nodes: tuple[str, ...]
    ranks: int
    started_unix_s: float
    from_step: int  # of the checkpoint that it goes on from, 0: the beginning
    log_bytes: int = 0  # size of the job's log at the start
    ended_unix_s: float = 0.0  # 0: it runs, or was cut off before it could say
    code: int = 0  # exit code
    outcome: str = ""  # done, stopped, saved, interrupted, mistake, crash or lost: see verdict.py
    reached: int = 0  # last step that was done
    said: str = ""  # its last words on stderr
    signal: int = 0  # that stopped or interrupted it, 0: none

    @property
    def is_open(self) -> bool:
        """True while nothing is known of its end."""
        return not self.ended_unix_s


def _append(run_dir: Path, record: dict[str, Any]) -> None:
    path = run_dir / FILE
    try:
        torn = path.is_file() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        with path.open("a") as file:
            file.write(("\n" if torn else "") + json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(
            f"run.dir: {path} cannot be written ({error.strerror}); free space or make it writable"
        ) from error


def record_start(run_dir: Path, launch: Launch) -> None:
    """Append the start of a launch."""
    _append(run_dir, {"kind": "start", **asdict(launch)})


def record_end(run_dir: Path, launch: Launch) -> None:
    """Append what is now known of its end."""
    _append(run_dir, {"kind": "end", **asdict(launch)})


def read_launches(run_dir: Path) -> list[Launch]:
    """All launches in their order. One that left no end behind although another followed, was lost."""
    found: list[Launch] = []
    for record in _records(run_dir / FILE, 0):
        kind = record.pop("kind", "")
        try:
            launch = Launch(**{**record, "nodes": tuple(record["nodes"])})
        except (KeyError, TypeError):
            continue  # of another version
        if kind == "start":
            if found and found[-1].is_open:
                found[-1] = replace(found[-1], outcome="lost", ended_unix_s=launch.started_unix_s)
            found.append(launch)
        elif kind == "end":
            for index in reversed(range(len(found))):
                if (found[index].job, found[index].started_unix_s) == (launch.job, launch.started_unix_s):
                    found[index] = launch
                    break
    return found


def _records(path: Path, tail: int) -> Iterator[dict[str, Any]]:
    """Objects of a file of JSON lines (only of its last `tail` bytes, 0: all); a line cut short is passed over."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - tail) if tail else 0
        file.seek(start)
        lines = file.read().split(b"\n")
    for line in lines[1:] if start else lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


@dataclass(frozen=True)
class RunTail:
    """The last records of a run's metrics, of each kind, oldest first."""

    starts: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    checkpoints: list[dict[str, Any]]
    ends: list[dict[str, Any]]

    def since(self, unix_time_s: float) -> RunTail:
        """Only what was written after a moment."""
        lists = (self.starts, self.steps, self.evals, self.checkpoints, self.ends)
        return RunTail(*([record for record in series if record["unix_time_s"] >= unix_time_s] for series in lists))

    @property
    def last_unix_s(self) -> float:
        """When the last record was written, 0: there is none."""
        lists = (self.starts, self.steps, self.evals, self.checkpoints, self.ends)
        return max((series[-1]["unix_time_s"] for series in lists if series), default=0.0)


def count_starts(run_dir: Path) -> int:
    """How often training began, of all of RUN_DIR/metrics.jsonl: a second for millions of steps."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        return sum(1 for line in file if b'"start"' in line and _kind(line) == "start")


def _kind(line: bytes) -> str:
    try:
        record = json.loads(line)
    except ValueError:
        return ""  # cut short
    return str(record.get("kind", "")) if isinstance(record, dict) else ""


def read_tail(run_dir: Path) -> RunTail:
    """The end of RUN_DIR/metrics.jsonl, in a moment however long the run."""
    kinds: dict[str, list[dict[str, Any]]] = {"start": [], "step": [], "eval": [], "checkpoint": [], "end": []}
    for record in _records(run_dir / "metrics.jsonl", _TAIL_BYTES):
        if record.get("kind") in kinds and _is_whole(record):
            kinds[record["kind"]].append(record)
    return RunTail(*kinds.values())


def _is_whole(record: dict[str, Any]) -> bool:
    """Whether it has what every reader needs, as numbers."""
    step, when = record.get("step"), record.get("unix_time_s")
    needed = {"step": ("step_time_s",), "eval": ("val_loss", "val_ppl")}.get(record["kind"], ())
    return (
        isinstance(step, int)
        and isinstance(when, int | float)
        and all(isinstance(record.get(name), int | float | None) and name in record for name in needed)
    )
