"""A window of steps as Chrome traces (`profile.steps`), recorded by torch.profiler, which sleeps outside of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from egmla_megatron.config.schema import RunConfig
from egmla_megatron.train.leave import gpu_is_profiled

__all__ = ["StepProfiler"]


class StepProfiler:
    """RUN_DIR/profile/rankR_steps_A_B.json.gz, where A to B are the steps that this start really recorded.

    The step before the window is the profiler's warm-up. A trace that cannot be written is named on stderr and costs
    nothing else.

    Args:
        start_step: steps done before this start.
        on_written: called with the path.
    """

    def __init__(
        self, cfg: RunConfig, rank: int, device: torch.device, start_step: int, on_written: Callable[[Path], None]
    ) -> None:
        first, last = cfg.profile.steps or (0, -1)
        self.first, self.last = max(first, start_step + 1), last
        self.warmup = int(self.first > start_step + 1)
        self.mine = rank in cfg.profile.ranks and self.first <= self.last
        self.rank, self.cuda, self.on_written = rank, device.type == "cuda", on_written
        self.folder = Path(cfg.run.dir) / "profile"
        self.profiler: Any = None
        self.recorded = 0  # newest step in the trace

    def covers(self, step: int) -> bool:
        """Whether some rank profiles this step, which makes it slower for all."""
        return self.first - self.warmup <= step <= self.last

    def begin(self, step: int) -> None:
        """Before every step."""
        if self.mine and step == self.first - self.warmup:
            self.profiler = self._start()

    def end(self, step: int) -> None:
        """After every step."""
        if self.profiler is None:
            return
        self.recorded = step
        self.profiler.step()  # after the last one: writes
        if step == self.last:
            self.close()

    def close(self) -> None:
        """Stop; a window that is cut short is written as far as it came."""
        if self.profiler is not None:
            profiler, self.profiler = self.profiler, None
            profiler.stop()

    def _start(self) -> Any:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
        plan = schedule(wait=0, warmup=self.warmup, active=self.last - self.first + 1, repeat=1)
        profiler = profile(activities=activities, schedule=plan, on_trace_ready=self._write, acc_events=True)
        profiler.start()
        if self.cuda:
            gpu_is_profiled()
        return profiler

    def _write(self, profiler: Any) -> None:
        path = self.folder / f"rank{self.rank}_steps_{self.first}_{self.recorded}.json.gz"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            print(f"warning: rank {self.rank} cannot write {path}: {error}", file=sys.stderr, flush=True)
        else:
            self.on_written(path)
