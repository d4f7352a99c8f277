"""Reports of runs that are unlike others: few lines, profiled steps, another layout after a restart, broken lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from egmla_megatron.config.load import dump_yaml, load_config
from egmla_megatron.errors import UserError
from egmla_megatron.report.plots import bars
from egmla_megatron.report.predicted import prediction
from egmla_megatron.report.read import read_run
from egmla_megatron.report.summary import summarize
from egmla_megatron.report.times import stragglers
from egmla_megatron.report.write import write_comparison, write_report
from egmla_megatron.train.events import EVENTS
from egmla_megatron.train.sinks import Console
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
    assert "| memory of the worst rank, last start (MiB) |" in prediction(metrics)
    assert (summarize(metrics).peak_memory_mib, summarize(metrics).peak_memory_rank) == (3000.0, 3)


def test_the_peak_of_a_run_is_one_number_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The most was held in steps that a restart threw away; by the last start, in the evaluation behind its steps."""
    lost = [_step(step, 5.0, peak_memory_mib=900.0 + step, peak_memory_rank=1) for step in range(1, 5)]
    again = [_step(step, 5.0, peak_memory_mib=890.0 + step, peak_memory_rank=0) for step in range(3, 5)]
    end = dict.fromkeys(EVENTS["end"], 0.0) | {"kind": "end", "step": 4, "reason": "done", "tokens_per_second": None}
    end |= {"peak_memory_mib_by_rank": [895, 903], "reserved_memory_mib_by_rank": None}
    metrics = read_run(_run(tmp_path, [_start(0, None), *lost, _start(2, 2), *again, end]))
    assert (summarize(metrics).peak_memory_mib, summarize(metrics).peak_memory_rank) == (904.0, 1)
    last = summarize(metrics.last_start())
    assert (last.peak_memory_mib, last.peak_memory_rank, last.reserved_memory_mib) == (903.0, 1, None)
    Console().write("end", end)
    assert "; peak_memory 903 MiB (rank 1)" in capsys.readouterr().out
    assert "| peak memory of the worst rank (MiB) | 904 (rank 1) |" in write_report(tmp_path).read_text()


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
        with pytest.raises(UserError, match="--out"):
            write_report(runs[0], bad)
    before = sorted(path.name for path in runs[1].iterdir())
    written = write_report(runs[1], tmp_path / "new/out")  # a run that may not be written to
    assert written == tmp_path / "new/out/report.md" and written.with_suffix(".html").is_file()
    assert sorted(path.name for path in runs[1].iterdir()) == before


def _timeline(*events: tuple[str, int, float]) -> list[dict[str, object]]:
    """(kind, step, second) with steps of one second."""
    make = {"start": lambda step: _start(step, None), "step": lambda step: _step(step, 5.0, step_time_s=1.0)}
    return [make[kind](step) | {"unix_time_s": 1.7e9 + second} for kind, step, second in events]


def test_time_lost_in_restarts(tmp_path: Path) -> None:
    """All seconds but those of thirteen steps; the first stop throws four away, the second, before they are made up
    for, two more."""
    first = [("start", 0, 0.0), *(("step", step, float(step)) for step in range(1, 13))]
    once = [("start", 8, 32.0), *(("step", step, 24.0 + step) for step in range(9, 14))]
    metrics = read_run(_run(tmp_path / "once", _timeline(*first, *once)))
    assert metrics.restart_s == pytest.approx(37 - 13)
    text = write_report(tmp_path / "once").read_text()
    assert (
        "| restarts (standing still, starting, repeating steps) | 24.0 | 64.9% |" in text and "| sum | 37.0 |" in text
    )
    twice = [*once[:3], ("start", 8, 50.0), *(("step", step, 42.0 + step) for step in range(9, 14))]
    assert read_run(_run(tmp_path / "twice", _timeline(*first, *twice))).restart_s == pytest.approx(55 - 13)
    never = read_run(_run(tmp_path / "never", _timeline(*first, *once[:3])))  # still behind
    assert never.restart_s == pytest.approx(34 - 10)
    smooth = read_run(_run(tmp_path / "smooth", _timeline(*first)))
    assert smooth.restart_s == 0.0 and "restarts (" not in write_report(tmp_path / "smooth").read_text()


def test_no_straggler_below_the_noise(tmp_path: Path) -> None:
    def said(slowest: list[int], lag_s: float) -> str:
        extra = {"slowest_node": "node7", "slowest_rank_busy_s": 0.4 + lag_s, "fastest_rank_busy_s": 0.4}
        steps = [_step(step, 5.0, slowest_rank=rank, **extra) for step, rank in enumerate(slowest, 1)]
        return stragglers(read_run(_run(tmp_path / "run", [_start(0, None) | {"world_size": 4}, *steps])))

    assert "| 3 | node7 | 100% | 30.0 ms, +6.0% |" in said([3] * 40, 0.03)
    assert "No rank stands out: the slowest most often is 3 on node7, in 100%" in said([3] * 40, 0.02)  # of 500 ms
    assert "No rank stands out" in said([0, 1, 2, 3] * 10, 0.03)  # each as often as chance has it
    table = said([2, 0, 2, 2] * 10, 0.03)
    assert "| 2 | node7 | 76% |" in table and "| 0 |" not in table
    assert "No rank stands out" in said([*range(4), *range(4)], 0.03)  # too few to know


def test_bars_and_the_marks_of_restarts() -> None:
    chunks, edges, marks = bars([1, 2, 3, 4, 5, 6], [4], 1)
    assert edges == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5] and marks == [4.5]
    chunks, edges, marks = bars([10, 20, 30, 40, 50], [28, 50, 3], 2)  # lines every ten steps, two in a bar
    assert chunks == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert edges == [5, 25, 45, 55] and marks == [25, 55, 5]
