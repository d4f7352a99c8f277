"""Starts a worker script, or the real trainer, on several gloo ranks, and never waits for ever.

A cold start is what a user types: a fresh interpreter, torchrun for several ranks. A warm start forks the same ranks
off a process that has imported everything (nursery.py), for tests of what ranks compute; where there is a GPU all
starts are cold, since CUDA does not survive a fork.

A failing gloo rank leaves the others in a collective, so every job has a time limit, runs in a process group of its
own and is killed as a whole.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TRAINER = ("-m", "egmla_megatron.train")
TIME_LIMIT_S = 240.0
_SCRATCH = tempfile.TemporaryDirectory(prefix="egmla-tests-", ignore_cleanup_errors=True)  # of this session
_GPUS = any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg"))


class Forked:
    """A job of the nursery, as if it were a subprocess.Popen. `ended`: the file that its exit code comes in."""

    def __init__(self, pid: int, ended: Path) -> None:
        self.pid, self.ended = pid, ended

    def poll(self) -> int | None:
        assert nursery().poll() is None, "the nursery has ended"
        return int(self.ended.read_text()) if self.ended.exists() else None

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + (timeout or TIME_LIMIT_S)
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a forked job", timeout or TIME_LIMIT_S)
            time.sleep(0.02)
        return code


@dataclass
class Job:
    """A started command with its output in files: pipes fill up when nobody reads them."""

    process: subprocess.Popen[bytes] | Forked
    log: Path
    limit_s: float = TIME_LIMIT_S
    started: float = field(default_factory=time.monotonic)

    @property
    def output(self) -> str:
        """stdout and stderr so far."""
        return self.log.read_text(errors="replace")

    def wait(self) -> int:
        """Exit code. A job over its time limit is killed, and the test fails with the job's output."""
        try:
            return self.process.wait(max(0.1, self.limit_s - (time.monotonic() - self.started)))
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"no end after {self.limit_s:.0f} s:\n{self.output[-6000:]}") from None

    def wait_for(self, text: str) -> None:
        """Wait until the job has printed `text`; fails when it ends or runs out of time before that."""
        while text not in self.output:
            over = time.monotonic() - self.started > self.limit_s
            if over or self.process.poll() is not None:
                self.kill()
                raise AssertionError(f"{text!r} did not appear:\n{self.output[-6000:]}")
            time.sleep(0.05)

    def succeed(self) -> str:
        """The output; fails with it when the exit code is not 0."""
        code = self.wait()
        assert code == 0, f"exit code {code}:\n{self.output[-6000:]}"
        return self.output

    def kill(self) -> None:
        """SIGKILL to every process of the job, at once; nothing when it has ended: its id may be another's by now."""
        if self.process.poll() is not None:
            return
        for group in {self.process.pid, *_groups_of_children(self.process.pid)}:
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


def _groups_of_children(pid: int) -> set[int]:
    """Process groups below `pid`: torchrun gives every rank its own session."""
    import psutil

    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return set()
    groups = set()
    for child in children:
        try:
            groups.add(os.getpgid(child.pid))
        except ProcessLookupError:
            continue
    return groups - {os.getpgrp()}


def start(ranks: int, command: Sequence[str], log: Path, *, warm: bool = False, preexec: Any = None, **env: str) -> Job:
    """Start `python COMMAND` on `ranks` ranks; cold, through torchrun (one rank: directly, as a user would)."""
    assert not (warm and preexec), "a forked job has no moment before its start"
    if warm and not _GPUS:
        return Job(_fork(ranks, command, log, environment(**env)), log)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", *launcher, *command],
            cwd=ROOT,
            env=environment(**env),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=preexec,
        )
    return Job(process, log)


@cache
def nursery() -> subprocess.Popen[str]:
    """That of this session, which ends with it."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.dist.nursery"],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdin
    atexit.register(process.stdin.close)
    return process


_numbers = count()


def _fork(ranks: int, command: Sequence[str], log: Path, env: dict[str, str]) -> Forked:
    ended = Path(_SCRATCH.name) / f"job{next(_numbers)}"
    log.write_bytes(b"")  # it is read before the job writes
    job = {"ranks": ranks, "command": command, "cwd": str(ROOT), "env": env, "log": str(log), "ended": str(ended)}
    process = nursery()
    assert process.stdin and process.stdout
    process.stdin.write(json.dumps(job) + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    assert answer, "the nursery has ended, its last words are in this test's output"
    return Forked(int(answer), ended)


def environment(**changes: str) -> dict[str, str]:
    """Environment of a job: one thread a process, nothing inherited from another job."""
    inherited = dict(os.environ)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        inherited.pop(name, None)
    if inherited.pop("PYTHONDONTWRITEBYTECODE", ""):  # every start would compile all of torch
        inherited.setdefault("PYTHONPYCACHEPREFIX", _SCRATCH.name)
    paths = os.pathsep.join(filter(None, (str(ROOT), inherited.get("PYTHONPATH"))))
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1"}
    return {**inherited, **own, "OMP_WAIT_POLICY": "passive", **changes}


def start_worker(ranks: int, script: str, folder: Path, *arguments: str) -> Job:
    """Start tests/dist/SCRIPT FOLDER ARGUMENTS...; each rank leaves FOLDER/rank<N>.json."""
    folder.mkdir(parents=True, exist_ok=True)
    worker = Path(__file__).with_name(script)
    return start(ranks, [str(worker), str(folder), *arguments], folder / "log", warm=True)


def results(job: Job, folder: Path, ranks: int) -> list[dict[str, Any]]:
    """What every rank of a worker found out; fails with the job's output when one did not come that far."""
    job.succeed()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def start_trainer(ranks: int, log: Path, config: Path, *overrides: str, warm: bool = True, **options: Any) -> Job:
    """Start the real command line of the trainer."""
    return start(ranks, [*TRAINER, str(config), *overrides], log, warm=warm, **options)


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Events of one kind from a run's metrics.jsonl, in the order in which they were written."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def trained(run_dir: Path) -> dict[int, tuple[float, float, float]]:
    """Step -> (loss, gradient norm, lr); of a step that was done twice, the later."""
    return {event["step"]: (event["loss"], event["grad_norm"], event["lr"]) for event in events(run_dir, "step")}
