"""What must not cost a run: a second job, a failing log, an old checkpoint that stays, a save that failed elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from egmla_megatron.checkpoint.failures import raise_unless_disk
from egmla_megatron.checkpoint.prune import prune
from egmla_megatron.errors import UserError
from egmla_megatron.parallel.child_processes import STOP_SIGNALS
from egmla_megatron.parallel.together import together
from egmla_megatron.train import signals
from egmla_megatron.train.lock import lock_run_dir
from egmla_megatron.train.sinks import JsonLines, Sinks

HOLD = """
import sys, time
from pathlib import Path
from egmla_megatron.train import signals
from egmla_megatron.train.lock import lock_run_dir
lock = lock_run_dir(Path(sys.argv[1]), wait_s=0)
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_job_in_a_run_folder_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    first = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=rf"in use by .*pid {first.pid}.*another run\.dir"):
            lock_run_dir(tmp_path, wait_s=0.3)
    finally:
        first.kill()
        first.wait()
    lock_run_dir(tmp_path, wait_s=0.3).close()


class Failing:
    """A sink whose disk is full."""

    def __init__(self) -> None:
        self.calls = 0

    def write(self, kind: str, event: Any) -> None:
        self.calls += 1
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        raise OSError(28, "No space left on device")


def test_a_failing_sink_is_named_once_and_costs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failing, file = Failing(), JsonLines(tmp_path / "metrics.jsonl")
    sinks = Sinks([failing, file])
    for step in range(3):
        sinks.write("step", {"step": step})
    sinks.close()
    assert failing.calls == 3  # tried again: space may have been freed
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    error = capsys.readouterr().err
    assert error.count("warning: ") == 1 and "Failing" in error and "No space left" in error


def test_slow_sinks_get_every_event_when_there_is_time(tmp_path: Path) -> None:
    fast, slow = JsonLines(tmp_path / "fast"), JsonLines(tmp_path / "slow")

    def written() -> list[int]:
        return [len((tmp_path / name).read_text().splitlines()) for name in ("fast", "slow")]

    sinks = Sinks([fast], [slow])
    sinks.write("step", {"step": 1})
    sinks.write("eval", {"step": 1})
    assert written() == [2, 0]
    sinks.flush()
    sinks.flush()
    assert written() == [2, 2]
    sinks.write("end", {"step": 1})
    sinks.close()
    assert written() == [3, 3]


def test_a_half_deleted_checkpoint_goes_with_the_next_prune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from egmla_megatron.checkpoint import manifest
    from egmla_megatron.checkpoint import prune as pruning

    for step in (1, 2, 3):
        (tmp_path / f"step_{step:08d}").mkdir()
    (tmp_path / "step_00000003" / manifest.MARKER).write_text("")
    monkeypatch.setattr(pruning, "complete_checkpoints", lambda root: [root / "step_00000003"])
    (tmp_path / "step_00000002" / manifest.MARKER).write_text("")  # marked but torn: evidence, left alone
    prune(tmp_path, 2, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "step_00000003"]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        dist.DistBackendError("NCCL watchdog"),
        RuntimeError("[pair.cc:534] Connection closed by peer"),
        CheckpointException("write", {1: (torch.OutOfMemoryError("CUDA out of memory"), None)}),
        CheckpointException("write", {1: (RuntimeError("CUDA error: an illegal access"), None)}),
    ],
)
def test_what_is_not_the_disk_is_not_blamed_on_it(error: BaseException) -> None:
    with pytest.raises((torch.OutOfMemoryError, RuntimeError)) as caught:
        raise_unless_disk(error)
    assert "disk" not in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        RuntimeError("[enforce fail] PytorchStreamWriter failed writing file"),
        CheckpointException("write", {0: (OSError(28, "No space left on device"), None)}),
        CheckpointException(
            "write", {0: (RuntimeError("Worker failure: starting worker 0, error: <class 'OSError'>"), None)}
        ),
    ],
)
def test_what_is_the_disk_passes(error: BaseException) -> None:
    raise_unless_disk(error)


def test_an_error_of_one_rank_becomes_every_ranks(world: Any) -> None:
    def fail() -> None:
        raise UserError("data.train: got nothing")

    with pytest.raises(UserError, match=r"data\.train: got nothing"):
        together(world, fail)
    assert together(world, lambda: 3) == 3


ORPHAN = """
import torch
from egmla_megatron.data.batch import DataShare, batch_iterator
from types import SimpleNamespace as Fake

class Data(list):
    config = Fake(reset_position_ids=False)

sample = {name: torch.ones(4, dtype=torch.long) for name in ("tokens", "labels", "loss_mask")}
chosen = [{0: [n]} for n in range(4)]
batches = batch_iterator(Data([sample] * 8), chosen, torch.device("cpu"), num_workers=1, share=DataShare(9))
next(batches)
raise RuntimeError("a bug")
"""


def test_an_uncaught_error_ends_a_rank_although_its_workers_hear_no_signal() -> None:
    done = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "RuntimeError: a bug" in done.stderr


def test_a_signal_that_comes_twice_at_once_is_one_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        stop = signals.StopRequest()
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert stop.received == signal.SIGINT
        monkeypatch.setattr(signals, "ONE_SIGNAL_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


COMPILED = """
import os, signal, sys
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from egmla_megatron.train.signals import StopRequest

@triton.jit
def add_one(x, y, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, i < n) + 1, i < n)

stop = StopRequest()
types = {"x": "*fp32", "y": "*fp32", "n": "i32"}
triton.compile(triton.compiler.ASTSource(add_one, types, constexprs={"BLOCK": 128}), target=GPUTarget("cuda", 90, 32))
os.kill(os.getpid(), signal.SIGUSR1)
print("lost" if not stop.received else "heard", end=" ")
stop.catch()
os.kill(os.getpid(), signal.SIGUSR1)
print(stop.received)
"""


def test_signals_are_heard_after_a_kernel_was_compiled(tmp_path: Path) -> None:
    """Compiling in this process replaces signal handlers; "heard" here would mean that it no longer does."""
    pytest.importorskip("triton")
    script = tmp_path / "compiled.py"  # Triton reads the source of kernels
    script.write_text(COMPILED)
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, env=env)
    assert done.stdout.split() == ["lost", str(int(signal.SIGUSR1))], done.stdout + done.stderr
