"""Reports of synthetic runs: what a restart does to the curve, what a torn line does, what the tables say."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from egmla_megatron.config.check import check_config
from egmla_megatron.config.load import dump_yaml, load_config
from egmla_megatron.errors import UserError
from egmla_megatron.report.plots import _running_mean
from egmla_megatron.report.read import evaluation_at, read_run
from egmla_megatron.report.summary import spread, summarize
from egmla_megatron.report.write import write_report

_TOKENS = 4096  # per step


def _step(step: int, loss: float, **extra: Any) -> dict[str, Any]:
    record = {"kind": "step", "step": step, "loss": loss, "grad_norm": 1.0, "lr": 1e-3, "step_time_s": 0.5}
    record |= {"tokens": step * _TOKENS, "tokens_per_second": 8000.0 + step, "tokens_per_second_per_rank": 4000.0}
    record |= {"tflops_per_second_per_rank": 0.1, "mfu": None, "peak_memory_mib": 900.0 + step, "skipped": False}
    return record | {"unix_time_s": 1.7e9 + step} | extra


def _start(step: int, resumed_from: int | None) -> dict[str, Any]:
    record = {"kind": "start", "step": step, "resumed_from": resumed_from, "world_size": 2, "device": "cpu"}
    return record | {"unix_time_s": 1.7e9 + step}


def _eval(step: int, loss: float) -> dict[str, Any]:
    return {"kind": "eval", "step": step, "val_loss": loss, "val_ppl": math.exp(loss), "tokens": 1000}


def _run(folder: Path, records: list[dict[str, Any]], tail: str = "", name: str = "demo") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump_yaml(load_config("quickstart", [f"run.name={name}"])))
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(lines + tail)
    return folder


def _interrupted() -> list[dict[str, Any]]:
    """Twelve steps, the checkpoint of step 8 resumed, and on to 20."""
    records = [_start(0, None), *(_step(step, 9.0 - step / 10) for step in range(1, 9))]
    records += [{"kind": "checkpoint", "step": 8, "seconds": 0.25, "path": "checkpoints/step_8"}, _eval(8, 8.5)]
    records += [*(_step(step, 99.0) for step in range(9, 13)), _eval(12, 99.0), _start(8, 8)]
    records += [*(_step(step, 9.0 - step / 10) for step in range(9, 21)), _eval(16, 7.5), _eval(20, 7.75)]
    return [*records, {"kind": "end", "step": 20}]


def test_a_restart_replaces_what_was_lost(tmp_path: Path) -> None:
    metrics = read_run(_run(tmp_path, _interrupted()))
    assert [record["step"] for record in metrics.steps] == list(range(1, 21))
    assert [record["step"] for record in metrics.evals] == [8, 16, 20]
    assert max(record["loss"] for record in metrics.steps) < 9
    assert metrics.lost_steps == 4
    assert [record["step"] for record in metrics.restarts] == [8]


def test_prediction_and_html(tmp_path: Path) -> None:
    records = _interrupted()
    records[0]["predicted_memory_mib"] = {"weights": 400.0, "activations": 460.0, "total": 860.0}
    records[-1 - len(records) // 2 : -1] = []
    text = write_report(_run(tmp_path / "a run", records)).read_text()
    peak = max(record["peak_memory_mib"] for record in records if record["kind"] == "step")
    assert f"| memory of the worst rank (MiB) | 860 | {peak:,.0f} | {860 / peak - 1:+.1%} |" in text
    assert "| activations | 460 |" in text and "tokens/s, all ranks | 8" in text and "step time (ms)" not in text
    page = (tmp_path / "a run" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2 and ".png" not in page.replace("image/png", "")
    assert ">memory of the worst rank (MiB)</td>" in page


_PARTS = {"time_data_s": 0.01, "time_forward_backward_s": 0.3, "time_optimizer_s": 0.1, "time_exchange_s": None}


def _on_gpus(folder: Path) -> Path:
    """A run of Base on two H200, two ranks, whose log has everything that a trainer can write."""
    settings = ["train.global_batch_size=16", "parallel.gate_group=2", "train.cuda_graph=true", "run.name=demo"]
    cfg = load_config("pretrain_base", settings)
    layout = asdict(check_config(cfg, 2))
    start = _start(0, None) | {"device": "NVIDIA H200", "implementation": "te", "kernels": "triton", "layout": layout}
    records = [start | {"predicted_memory_mib": {"weights": 800.0, "total": 800.0}}]
    for step in range(1, 41):
        straggler = {"slowest_rank": int(step % 8 == 0), "slowest_node": "node7", "slowest_rank_busy_s": 0.44}
        extra = (
            _PARTS | straggler | {"fastest_rank_busy_s": 0.4, "reserved_memory_mib": 990.0, "unique_id_fraction": 0.2}
        )
        extra |= {"time_gradient_sync_s": 0.05 if step % 2 else None, "mfu": 0.3, "tokens_per_second": 500_000.0}
        records.append(_step(step, 9.0 - step / 10, **extra))
    records.append({"kind": "eval", "step": 40, "val_loss": 6.0, "val_ppl": 403.4, "tokens": 9, "seconds": 2.0})
    end = {"kind": "end", "step": 40, "training_s": 18.5, "warmup_s": 1.5, "evaluation_s": 2.0, "checkpoint_s": 3.0}
    run = _run(folder, [*records, end])
    (run / "config.yaml").write_text(dump_yaml(cfg))
    return run


def test_all_that_a_trainer_can_measure(tmp_path: Path) -> None:
    run = _on_gpus(tmp_path / "run")
    text = write_report(run).read_text()
    rows = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")[1:] for line in text.splitlines()}
    assert rows["forward and backward"] == ["300.00", "300.00", "300.00", "60.0%", "37"]
    assert rows["gradient reduction"][0] == "0.00" and rows["gradient reduction"][3] == "4.9%"  # every other step
    assert rows["rest"][0] == "90.00" and "exchange of gate embeddings" not in rows
    assert rows["reserved by torch's allocator (MiB)"] == ["990"]
    assert rows["0"] == ["node7", "86%", "40.0 ms, +8.0%"] and "1" not in rows  # the other only by chance
    assert rows["steps that count"] == ["18.5", "74.0%"] and rows["evaluations"] == ["2.0", "8.0%"]
    assert rows["sum"][0] == "25.0"
    planned, measured, error = rows["tokens/s, all ranks"]  # the last table with such a row
    rate = float(planned.replace(",", ""))
    assert measured == "500,000" and error == f"{rate / 500_000 - 1:+.1%}" and 600_000 < rate < 900_000
    assert rows["MFU (%)"][1] == "30.0" and rows["distinct ids of a micro-batch (%)"] == ["21.0", "20.0", "+5.0%"]
    assert (run / "step_time.png").stat().st_size > 10_000 and "](step_time.png)" in text
    assert (run / "report.html").read_text().count("data:image/png;base64,") == 3 and "FP8" not in text
    in_fp8 = [
        "train.fp8=tensorwise",
        "parallel.implementation=te",
        "train.global_batch_size=16",
        "train.cuda_graph=false",
    ]
    (run / "config.yaml").write_text(dump_yaml(load_config("pretrain_base", in_fp8)))
    text = write_report(run).read_text()
    assert (
        "Speed in FP8 is not estimated; memory is." in text
        and "tokens/s, all ranks | 5" in text
        and "limited by" not in text
    )


def test_time_of_a_run_that_never_said_how_it_ended(tmp_path: Path) -> None:
    records = [_start(0, None), *(_step(step, 5.0) for step in range(1, 11)), _eval(10, 4.0) | {"seconds": 1.5}]
    records.append({"kind": "checkpoint", "step": 10, "seconds": 0.5, "path": "x"})
    text = write_report(_run(tmp_path, records)).read_text()
    assert "| steps that count | 3.5 | 50.0% |" in text and "| warm-up and profiled steps | 1.5 | 21.4% |" in text
    assert "| evaluations | 1.5 |" in text and "in the background) | 0.5 |" in text
    assert "part of a step" not in text and not (tmp_path / "step_time.png").exists()


def test_the_evaluation_of_a_checkpoint(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", _interrupted())
    found = [evaluation_at(run, step) for step in (7, 8, 12, 19, 20)]
    assert [record and record["val_loss"] for record in found] == [None, 8.5, 8.5, 7.5, 7.75]
    assert evaluation_at(tmp_path, 8) is None
    assert evaluation_at(_run(tmp_path / "new", [_start(0, None)]), 8) is None


def test_steps_beyond_a_restart_leave_the_curve_before_they_are_done_again(tmp_path: Path) -> None:
    records = [_start(0, None), *(_step(step, 5.0) for step in range(1, 11)), _start(4, 4), _step(5, 4.0)]
    metrics = read_run(_run(tmp_path, records))
    assert [record["step"] for record in metrics.steps] == [1, 2, 3, 4, 5]
    assert metrics.steps[-1]["loss"] == 4.0


def test_steady_steps_leave_out_the_warm_up_of_every_start(tmp_path: Path) -> None:
    metrics = read_run(_run(tmp_path, _interrupted()))
    assert metrics.config.logging.warmup_steps == 3
    assert [record["step"] for record in metrics.steady_steps()] == [4, 5, 6, 7, 8, *range(12, 21)]


@pytest.mark.parametrize("tail", ['{"kind": "step", "ste', '{"kind": "st{"kind": "step", "step": 3}\n', "[1]\n"])
def test_a_torn_line_is_counted_and_left_out(tmp_path: Path, tail: str) -> None:
    metrics = read_run(_run(tmp_path, [_start(0, None), _step(1, 5.0)], tail))
    assert (len(metrics.steps), metrics.torn_lines) == (1, 1)
    assert "cut short, left out: 1" in write_report(tmp_path).read_text()


def test_summary(tmp_path: Path) -> None:
    summary = summarize(read_run(_run(tmp_path, _interrupted())))
    assert (summary.steps, summary.tokens) == (20, 20 * _TOKENS)
    assert (summary.first_step, summary.first_loss) == (1, 8.9)
    assert (summary.last_loss.value, summary.last_loss.finite, summary.last_loss.finite_step) == (7.0, 7.0, 20)
    assert summary.mean_last_loss == pytest.approx(7.45)
    assert (summary.val_loss, summary.best_val_loss, summary.best_val_step) == (7.75, 7.5, 16)
    assert summary.training_time_s == pytest.approx(10.0)
    assert summary.peak_memory_mib == 920.0
    assert summary.mfu is None
    assert summary.tokens_per_second is not None
    assert (summary.tokens_per_second.n, summary.tokens_per_second.median) == (14, 8013.5)


def test_skipped_steps_with_nan_are_counted_and_not_averaged(tmp_path: Path) -> None:
    records = [_start(0, None), _step(1, 5.0), _step(2, math.nan, skipped=True), _step(3, 4.0)]
    run_dir = _run(tmp_path, records)
    summary = summarize(read_run(run_dir))
    assert summary.skipped == 1
    assert summary.mean_last_loss == 4.5
    text = write_report(run_dir).read_text()
    assert "skipped steps (NaN or Inf) | 1" in text and "training loss, last step (nats/token) | 4.0000 |" in text


def test_the_last_finite_loss_does_not_pass_for_the_last(tmp_path: Path) -> None:
    evaluated = [{"kind": "eval", "step": step, "val_loss": loss} for step, loss in ((5, 6.5), (20, None))]
    steps = [_step(5, math.nan, skipped=True), _step(10, 5.0), *(_step(step, math.nan) for step in range(11, 21))]
    run_dir = _run(tmp_path, [_start(0, None), *steps, *evaluated])
    summary = summarize(read_run(run_dir))
    assert (summary.last_loss.value, summary.mean_last_loss, summary.val_loss) == (None, None, None)
    text = write_report(run_dir).read_text()
    assert "training loss, step 5, the first with a line (nats/token) | not finite |" in text
    assert "last step (nats/token) | not finite; at step 10, the last that was: 5.0000 |" in text
    assert "mean of the last 10 steps with a line (nats/token) | not finite |" in text
    assert "validation loss, last (nats/token) | not finite; at step 5, the last that was: 6.5000 |" in text


def test_spread() -> None:
    assert spread([]) is None
    sample = spread([1.0, 2.0, 3.0, 4.0, 100.0])
    assert sample is not None
    assert (sample.median, sample.low, sample.high, sample.n) == (3.0, 2.0, 4.0, 5)


def test_running_mean() -> None:
    assert _running_mean([1.0, 3.0, 8.0, 7.0], 3) == [2.0, 4.0, 6.0, 7.5]
    line = [float(index) for index in range(50)]
    assert _running_mean(line, 9)[4:-4] == pytest.approx(line[4:-4])


def test_report_files_and_tables(tmp_path: Path) -> None:
    path = write_report(_run(tmp_path, _interrupted()))
    text = path.read_text()
    assert path == tmp_path / "report.md"
    for part in ("validation perplexity, last | 2321.57", "EG-MLA, 4 heads, latent 32", "| 8,014 |", "TP 1"):
        assert part in text
    assert "| 2 | 8 | 8 | 2 |" in text
    assert "Steps whose work was lost to a restart: 4." in text
    for name in ("loss.png", "throughput.png"):
        assert f"]({name})" in text
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / name).stat().st_size > 10_000
    assert not list(tmp_path.glob("*.tmp"))


def test_damaged_checkpoints_that_a_start_passed_over_are_named_once(tmp_path: Path) -> None:
    records = _interrupted()
    for record in records:
        if record["kind"] == "start":
            record["passed_over"] = ["step_00000012: data has 13 bytes of 18"]
    text = write_report(_run(tmp_path, records)).read_text()
    assert text.count("Damaged and passed over: step_00000012: data has 13 bytes of 18.") == 1


def test_a_run_without_evaluation_or_restart(tmp_path: Path) -> None:
    text = write_report(_run(tmp_path, [_start(0, None), _step(1, 5.0)])).read_text()
    assert "The run was not interrupted." in text
    assert "validation loss, last (nats/token) | –" in text


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run in"):
        read_run(tmp_path)
    with pytest.raises(UserError, match="no finished step"):
        read_run(_run(tmp_path, [_start(0, None)]))


def test_tool(root: Path, tmp_path: Path) -> None:
    runs = [str(_run(tmp_path / name, _interrupted(), name=name)) for name in ("one", "two")]
    command = [sys.executable, str(root / "tools" / "report.py")]
    done = subprocess.run([*command, *runs], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "comparison.md")
    assert (tmp_path / "two" / "report.md").exists()
    failed = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False, timeout=120)
    assert (failed.returncode, failed.stderr.count("\n")) == (2, 1)
    assert failed.stderr.startswith("error: no run in")
