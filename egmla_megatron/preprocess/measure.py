"""Runs commands and measures time, CPU time and memory; and what the machine is."""

from __future__ import annotations

import os
import platform
import re
import statistics
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from egmla_megatron.errors import UserError

__all__ = ["Run", "hardware", "run_command", "spread"]

_SAMPLE_S = 0.05  # seconds between looks at memory
_MIB = 1 << 20


@dataclass(frozen=True)
class Run:
    """One run of a command."""

    wall_s: float
    cpu_s: float  # of the command and all of its processes
    peak_mib: float  # resident memory of its largest process
    output: str


def hardware() -> dict[str, Any]:
    """What the numbers depend on."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = ("gigatoken", "tokenizers", "pyarrow", "orjson", "numpy", "megatron-core")
    return {
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def run_command(command: Sequence[str | Path]) -> Run:
    """Runs to the end and measures; UserError with its last words when it fails."""
    import psutil

    started = time.perf_counter()
    process = subprocess.Popen(
        [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    peak, ended = [0], threading.Event()

    def watch() -> None:
        root = psutil.Process(process.pid)
        while not ended.wait(_SAMPLE_S):
            try:
                for one in [root, *root.children(recursive=True)]:
                    peak[0] = max(peak[0], one.memory_info().rss)
            except psutil.NoSuchProcess:
                continue  # one ended between the list and the look

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    ended.set()
    watcher.join()
    if status:
        raise UserError(
            f"{command[0]} {command[1]} failed: {' '.join(output.split())[-400:]}; repair it or leave it out"
        )
    return Run(wall, usage.ru_utime + usage.ru_stime, peak[0] / _MIB, output)


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, smallest, largest."""
    found = sorted(values)
    return {"median": round(statistics.median(found), 3), "min": round(found[0], 3), "max": round(found[-1], 3)}
