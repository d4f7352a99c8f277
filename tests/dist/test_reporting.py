"""What a run of two ranks says of its steps: every documented name, the parts of the time, the slow rank, a trace."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from egmla_megatron.train.events import EVENTS
from tests.dist.harness import ROOT, Job, events, start
from tests.tiny import write_run

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(400)]
SLOW, SECONDS = 1, 1.0
PARTS = ("data", "forward_backward", "exchange", "gradient_sync", "optimizer")


def start_with_a_slow_rank(folder: Path, *overrides: str, **parallel: Any) -> tuple[Path, Job]:
    """(run folder, job)."""
    config, run = write_run(
        folder,
        "run",
        train={"steps": 4, "eval_interval": 2, "eval_batches": 1},
        optimizer={"distributed": "gate_group" in parallel, "lr": 1e-2, "warmup_steps": 1},
        parallel={"implementation": "torch", **parallel},
        checkpoint={"interval_steps": 2},
        logging={"tensorboard": True, "wandb": "disabled", "warmup_steps": 1},
    )
    worker = [str(ROOT / "tests/dist/slow_rank_worker.py"), str(SLOW), str(SECONDS), str(config), *overrides]
    return run, start(2, worker, folder / "log", warm=True)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, Job]]]:
    """Both side by side, since their ranks mostly sleep."""
    gate, stage = tmp_path_factory.mktemp("gate"), tmp_path_factory.mktemp("stage")
    started = {
        "gate": start_with_a_slow_rank(gate, "profile.steps=[2,3]", f"profile.ranks=[{SLOW}]", gate_group=2),
        "stage": start_with_a_slow_rank(stage, "profile.steps=[4,4]", pipeline=2),
    }
    yield started
    for _, job in started.values():
        job.kill()


def assert_slow_rank_is_named(run: Path, passes: int, output: str) -> None:
    """The fast rank waits for the other one, in the exchange, a pipeline or a reduction, and that is no work of its."""
    first, *others = events(run, "step")
    assert first["slowest_rank"] is first["slowest_node"] is first["slowest_rank_busy_s"] is None
    assert len(others) == 3
    for step in others:
        assert (step["slowest_rank"], step["slowest_node"]) == (SLOW, socket.gethostname())
        assert step["slowest_rank_busy_s"] >= passes * SECONDS > step["fastest_rank_busy_s"]
    assert f"slowest_rank {SLOW} on {socket.gethostname()}" in output


def assert_parts_add_up(run: Path) -> None:
    for step in events(run, "step"):
        parts = [step[f"time_{name}_s"] for name in PARTS]
        assert all(part >= 0 for part in parts)
        assert SECONDS <= sum(parts) <= step["step_time_s"]


def test_a_slow_rank_of_a_gate_group(jobs: dict[str, tuple[Path, Job]]) -> None:
    run, job = jobs["gate"]
    output = job.succeed()
    assert_slow_rank_is_named(run, 1, output)
    assert_parts_add_up(run)
    assert all(step["time_exchange_s"] > 0 for step in events(run, "step"))
    assert events(run, "profile") == []  # of rank 0's traces only
    assert_documented(run, {"start", "step", "eval", "checkpoint", "end"})
    assert events(run, "start")[0]["cuda_graph"] is False and "CUDA graph" not in output
    assert_phases(run)
    assert_tensorboard(run)
    assert_trace(run / "profile", SLOW)


def test_a_slow_stage(jobs: dict[str, tuple[Path, Job]]) -> None:
    run, job = jobs["stage"]
    assert_slow_rank_is_named(run, 2, job.succeed())
    assert_parts_add_up(run)
    assert [step["time_exchange_s"] for step in events(run, "step")] == [0.0] * 4
    (trace,) = (run / "profile").iterdir()
    assert trace.name == "rank0_steps_4_4.json.gz"
    assert [(event["step"], event["path"]) for event in events(run, "profile")] == [(4, str(trace))]


def assert_documented(run: Path, kinds: set[str]) -> None:
    for kind in kinds:
        for event in events(run, kind):
            assert event.keys() - {"kind", "unix_time_s"} == EVENTS[kind].keys(), kind


def assert_phases(run: Path) -> None:
    """Profiled steps, the first and the one that the profiler warms up in, are not in the throughput."""
    (end,) = events(run, "end")
    times = [step["step_time_s"] for step in events(run, "step")]
    assert end["training_s"] == pytest.approx(times[3])
    assert end["tokens_per_second"] == pytest.approx(64 / times[3])
    assert end["warmup_s"] == 0.0 and end["profile_s"] >= sum(times[:3])
    assert end["evaluation_s"] >= 2 * SECONDS and end["checkpoint_s"] > 0
    phases = ("training", "warmup", "profile", "evaluation", "checkpoint")
    assert sum(end[f"{name}_s"] for name in phases) <= end["total_s"]
    assert len(end["peak_memory_mib_by_rank"]) == 2 and min(end["peak_memory_mib_by_rank"]) > 50


def assert_tensorboard(run: Path) -> None:
    """The names of the steps' numbers and no others."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    unknown = {"step", "total_steps", "slowest_node", "mfu", "reserved_memory_mib", "reserved_memory_rank"}
    numbers = (EVENTS["step"].keys() - unknown) | (EVENTS["eval"].keys() - {"step"})
    assert set(found.Tags()["scalars"]) == numbers


def assert_trace(folder: Path, rank: int) -> None:
    """It opens, holds operations of the window's two steps, and nothing of another."""
    (path,) = folder.iterdir()
    assert path.name == f"rank{rank}_steps_2_3.json.gz"
    names = [event.get("name", "") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]
    assert "aten::mm" in names and any("all_to_all" in name for name in names)
    assert len({name for name in names if name.startswith("ProfilerStep#")}) == 2
