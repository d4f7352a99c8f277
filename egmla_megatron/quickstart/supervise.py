"""Starts the trainer as a user would, follows its metrics, can kill it like a power cut, and leaves none behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from egmla_megatron.errors import UserError
from egmla_megatron.parallel.child_processes import end_with
from egmla_megatron.progress import Bar

__all__ = ["Launch", "read_events", "resume_difference", "run_training"]


@dataclass(frozen=True)
class Launch:
    """How to start the trainer."""

    ranks: int
    config: str
    overrides: Sequence[str]
    run_dir: Path
    log: Path

    def command(self) -> list[str]:
        """The command line."""
        launcher = [sys.executable, "-m", "egmla_megatron.launch", "--standalone", f"--nproc-per-node={self.ranks}"]
        return [*launcher, "-m", "egmla_megatron.train", self.config, *self.overrides]


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """Finished lines of metrics.jsonl so far."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        return []
    events = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n") and line.strip():
            try:
                events.append(json.loads(line))
            except json.JSONDecodeError:
                continue  # half a line that a kill left behind
    return events


def _kill_everything(pid: int) -> None:
    """SIGKILL to a process and all it started, whatever sessions they are in: what a power cut does."""
    launcher = psutil.Process(pid)
    for each in [launcher, *launcher.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


def _follow(process: subprocess.Popen[bytes], launch: Launch, kill_at: int | None, bar: Any) -> bool:
    """Move the bar until the process ends; True when it was killed at `kill_at`."""
    while process.poll() is None:
        time.sleep(0.25)
        events = read_events(launch.run_dir)
        steps = [event for event in events if event["kind"] == "step"]
        if not steps:
            continue
        bar.set_postfix_str(f"loss {steps[-1]['loss']:.3f}", refresh=False)
        bar.update(steps[-1]["step"] - bar.n)
        saved = any(event["kind"] == "checkpoint" for event in events)
        if kill_at is not None and saved and steps[-1]["step"] >= kill_at:
            _kill_everything(process.pid)
            process.wait()
            return True
    return False


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _leaving_by_exception() -> Iterator[None]:
    """SIGTERM and SIGHUP (unless nohup says to ignore it) end this process as an exception does: cleaning up."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    # None: set by something other than Python, which could not be put back
    before = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, _leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_training(launch: Launch, total_steps: int, label: str, kill_at: int | None = None) -> bool:
    """Run the trainer to its end, or kill -9 it once step `kill_at` is done and a checkpoint is complete.

    It ends, having saved, when this process is stopped or killed.

    Returns:
        True when it was killed.

    Raises:
        UserError: the trainer failed; carries the end of its log.
    """
    quiet = 0.5 if sys.stderr.isatty() else 10.0  # seconds between redraws: a log file needs few
    with open(launch.log, "ab") as log, _leaving_by_exception():
        process = subprocess.Popen(
            launch.command(),
            stdout=log,
            stderr=log,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            preexec_fn=partial(end_with, os.getpid()),  # a SIGKILL runs no `finally`
        )
        try:
            with Bar(total=total_steps, desc=label, unit="step", mininterval=quiet, miniters=1) as bar:
                killed = _follow(process, launch, kill_at, bar)
                if not killed and process.returncode == 0:
                    bar.update(total_steps - bar.n)
        finally:
            if process.poll() is None:  # Ctrl-C or another signal here: the trainer saves and ends
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
    if not killed and process.returncode != 0:
        tail = launch.log.read_text(errors="replace").splitlines()
        errors = [line.removeprefix("error: ") for line in tail if line.startswith("error:")]
        said = (errors or tail[-1:] or ["it said nothing"])[-1]
        raise UserError(f"training ended with exit code {process.returncode}: {said} (log: {launch.log})")
    return killed


def resume_difference(events: Sequence[dict[str, Any]]) -> tuple[int, float]:
    """Steps computed both before the kill and after the resume, and the largest difference of their losses."""
    starts = [i for i, event in enumerate(events) if event["kind"] == "start"]
    if len(starts) < 2:
        return 0, float("inf")
    before, after = (
        {e["step"]: e["loss"] for e in part if e["kind"] == "step"}
        for part in (events[: starts[-1]], events[starts[-1] :])
    )
    shared = sorted(before.keys() & after.keys())
    return len(shared), max((abs(before[step] - after[step]) for step in shared), default=float("inf"))
