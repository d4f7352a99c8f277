"""Reports of runs that are unlike others: few lines, profiled steps, another layout after a restart, broken lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from egmla_megatron.config.load import dump_yaml, load_config
from egmla_megatron.errors import UserError
from egmla_megatron.report.predicted import prediction
from egmla_megatron.report.read import read_run
from egmla_megatron.report.summary import summarize
from egmla_megatron.report.write import write_comparison, write_report
from tests.unit.test_report import _run, _start, _step


def test_steps_without_a_line_count_in_the_time(tmp_path: Path) -> None:
    records = [_start(0, None), *(_step(step, 5.0) for step in (5, 10, 12, 15)), {"kind": "end", "step": 15}]
    metrics = read_run(_run(tmp_path, records))
    assert metrics.seconds_of_lines() == [2.5, 2.5, 1.0, 1.5]
    assert summarize(metrics).training_time_s == 15 * 0.5
    assert "| sum | 7.5 |" in write_report(tmp_path).read_text()


def test_profiled_steps_do_not_count(tmp_path: Path) -> None:
    folder = _run(tmp_path, [_start(0, None), *(_step(step, 5.0) for step in range(1, 21))])
    warmup = read_run(folder).config.logging.warmup_steps
    (folder / "config.yaml").write_text(dump_yaml(load_config("quickstart", ["profile.steps=[10,12]"])))
    counted = [record["step"] for record in read_run(folder).steady_steps()]
    assert counted == [step for step in range(warmup + 1, 21) if step not in (9, 10, 11, 12)]


def test_a_prediction_stands_beside_its_own_start(tmp_path: Path) -> None:
    """The first start had more ranks and took more memory."""
    first = [_step(step, 5.0, peak_memory_mib=3000.0, peak_memory_rank=3) for step in range(1, 9)]
    second = [_step(step, 5.0, peak_memory_mib=1000.0, peak_memory_rank=0) for step in range(9, 17)]
    start = _start(8, 8) | {"predicted_memory_mib": {"total": 1100.0}}
    metrics = read_run(_run(tmp_path, [_start(0, None), *first, start, *second]))
    assert "| 1,100 | 1,000 | +10.0% |" in prediction(metrics)
    assert (summarize(metrics).peak_memory_mib, summarize(metrics).peak_memory_rank) == (3000.0, 3)


def test_lines_that_are_of_no_run_are_left_out_and_counted(tmp_path: Path) -> None:
    broken = [
        {"kind": "step", "loss": 1.0},
        {"kind": "eval", "val_loss": 1.0},
        {"kind": "step", "step": "x", "loss": 1.0},
        {"kind": "step", "step": 3, "loss": "abc"},
        ["a list"],
    ]
    folder = _run(tmp_path, [_start(0, None), _step(1, 5.0), *broken])  # type: ignore[list-item]
    metrics = read_run(folder)
    assert (metrics.torn_lines, [record["step"] for record in metrics.steps]) == (5, [1])
    only = {"kind": "step", "step": 2, "loss": None}
    (folder / "metrics.jsonl").write_text(json.dumps(_start(0, None)) + "\n" + json.dumps(only) + "\n")
    assert "report.md" in str(write_report(folder))


def test_runs_of_one_name_and_folders_that_cannot_be_written(tmp_path: Path) -> None:
    for name in ("a", "b"):
        _run(tmp_path / name, [_start(0, None), *(_step(step, 5.0) for step in range(1, 9))], name="<same>")
    runs = [tmp_path / "a", tmp_path / "b"]
    text = write_comparison(runs, tmp_path).read_text()
    assert "(a)" in text and "(b)" in text
    assert "# &lt;same&gt;" in write_report(runs[0]).read_text()
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", Path("/proc/x")):
        with pytest.raises(UserError, match="--out"):
            write_comparison(runs, bad)
