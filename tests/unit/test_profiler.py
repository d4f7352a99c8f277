"""The profiled window: what of it is recorded, under which name, and what happens when that cannot be written."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from egmla_megatron.train.metrics import Throughput
from egmla_megatron.train.profiler import StepProfiler
from tests.tiny import tiny_run


def record(folder: Path, start: int, end: int, window: tuple[int, int], rank: int = 0) -> list[Path]:
    """Steps from `start` to `end`, each with as many multiplications as its number says."""
    cfg = tiny_run(folder=str(folder), profile={"steps": window})
    written: list[Path] = []
    profiler = StepProfiler(cfg, rank, torch.device("cpu"), start - 1, written.append)
    for step in range(start, end + 1):
        profiler.begin(step)
        for _ in range(step):
            torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        profiler.end(step)
    profiler.close()
    return written


def multiplications(path: Path) -> int:
    events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return sum(event.get("name") == "aten::mm" for event in events)


@pytest.mark.parametrize(
    ("start", "end", "name", "steps"),
    [
        (1, 6, "rank0_steps_3_4.json.gz", 3 + 4),
        (4, 6, "rank0_steps_4_4.json.gz", 4),  # resumed inside the window
        (1, 3, "rank0_steps_3_3.json.gz", 3),  # stopped inside it
    ],
)
def test_the_window_and_nothing_else(tmp_path: Path, start: int, end: int, name: str, steps: int) -> None:
    (path,) = record(tmp_path, start, end, (3, 4))
    assert path == tmp_path / "profile" / name
    assert multiplications(path) == steps


def test_who_records_nothing(tmp_path: Path) -> None:
    assert record(tmp_path, 5, 6, (3, 4)) == []  # resumed behind the window
    assert record(tmp_path, 1, 6, (3, 4), rank=1) == []  # not in profile.ranks
    assert not (tmp_path / "profile").exists()


def test_a_full_disk_costs_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "profile").write_text("a file in the way")
    assert record(tmp_path, 1, 6, (3, 4)) == []
    assert "warning: rank 0 cannot write" in capsys.readouterr().err


def test_profiled_steps_do_not_count_in_the_throughput() -> None:
    cfg = tiny_run(profile={"steps": (3, 4)}, logging={"warmup_steps": 1, "tensorboard": False})
    profiler = StepProfiler(cfg, 1, torch.device("cpu"), 0, lambda path: None)  # nor on ranks that do not record
    throughput = Throughput.of(cfg, 1, torch.device("cpu"))
    assert throughput.mean_rates()["tokens_per_second"] is None
    for step, seconds in enumerate((9.0, 9.0, 9.0, 9.0, 1.0, 3.0), start=1):
        throughput.add(seconds, profiled=profiler.covers(step))
    assert throughput.mean_rates()["tokens_per_second"] == throughput.work.tokens / 2.0
