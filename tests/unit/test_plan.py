"""The planning tool as its users call it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from egmla_megatron.report.cards import find_card, find_cluster
from egmla_megatron.report.plan import Hardware, make_comparison, make_plan, make_search
from egmla_megatron.report.show_plan import format_comparison, format_plan, format_search


def _plan(root: Path, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "tools" / "plan.py"), *arguments]
    return subprocess.run(command, cwd=cwd or root, capture_output=True, text=True, check=False, timeout=60)


def test_json(root: Path, tmp_path: Path) -> None:
    done = _plan(root, "pretrain_1b2", "model.num_layers=12", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["active_params"] + plan["gate_table_params"] == plan["total_params"]
    assert plan["kv_cache_elements_per_token"] == 12 * (128 + 64)
    assert plan["training_memory_bytes"]["total"] == 16 * plan["total_params"]
    for settings, wide in ((["train.precision=fp32"], 16), (["parallel.grad_reduce_dtype=bf16"], 14)):
        other = make_plan("pretrain_1b2", settings)
        assert other["training_memory_bytes"]["total"] == wide * other["total_params"]
    assert "layout" not in plan


def test_comparison_by_the_command(root: Path) -> None:
    done = _plan(root, "--compare", "pretrain_mla_base", "pretrain_base", "model.num_layers=6", "--gpus", "2", "--json")
    assert done.returncode == 0, done.stderr
    plans = json.loads(done.stdout)["plans"]
    assert list(plans) == ["pretrain_mla_base", "pretrain_base"]
    assert plans["pretrain_base"]["layout"]["layers_per_stage"] == 6
    assert [plan["gate_table_params"] > 0 for plan in plans.values()] == [False, True]


def test_table_names_the_contract_keys(root: Path) -> None:
    done = _plan(root, "configs/model/eg_mla_base_kv64.yaml")
    assert done.returncode == 0, done.stderr
    for key in ("active_params", "gate_table_params", "total_params", "kv_cache_elements_per_token"):
        assert key in done.stdout
    assert "120.1 M" in done.stdout


def test_layout() -> None:
    plan = make_plan("pretrain_base", ["parallel.gate_group=4"], world_size=8)
    assert plan["layout"]["gate_data_parallel"] == 2
    text = format_plan(plan)
    assert "replicas of a slice of the tables             2" in text
    assert not any(name in text for name in ("gate_data_parallel", "num_microbatches", " vp "))


def _hardware(gpus: int, price: float | None = None, name: str = "h100") -> Hardware:
    card = find_card(name, 80.0, 900.0)
    return Hardware(card, find_cluster(card, gpus, None, None, None), price)


def test_choices_beside_each_other() -> None:
    plan = make_plan("pretrain_1b2", ["parallel.gate_group=4"], 8)
    kept = plan["activations_bytes_by_recompute"]
    assert kept["none"] == plan["memory_per_rank_bytes"]["activations"] > kept["selective"] > kept["full"] > 0
    states = plan["optimizer_bytes"]
    assert states["distributed"] == plan["memory_per_rank_bytes"]["optimizer"]
    dense, tables = (plan["params_per_rank_by_stage"][0][name] for name in ("dense", "gate_tables"))
    assert states["not distributed"] == 12 * (dense + tables) and tables == plan["gate_table_params"] / 4
    assert states["distributed"] == pytest.approx(
        10 * (dense / 8 + tables / 2), abs=2
    )  # lower halves of master weights
    assert "estimate" not in plan


def test_the_cache_beside_mla_and_mha() -> None:
    cache = make_plan("eg_mla_xlarge_kv128_emb512")["kv_cache"]
    assert cache["this model"]["bytes_per_token"] == 2 * 24 * (128 + 64)
    assert cache["this model"]["bytes_per_32k_context"] == 32768 * 2 * 24 * (128 + 64)
    assert (
        cache["MLA, latent 512"]["bytes_per_token"]
        == make_plan("mla_xlarge_kv512")["kv_cache"]["this model"]["bytes_per_token"]
    )
    assert cache["MHA"]["bytes_per_token"] == 2 * 24 * 2 * 16 * 128
    assert list(make_plan("mha_base")["kv_cache"]) == ["this model"]


def test_the_plan_is_that_of_gpus_whatever_this_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("egmla_megatron.config.load.gpu_count", lambda: 0)
    plan = make_plan("pretrain_1b2", [], 8, _hardware(8))
    assert plan["cuda_graph"] and plan["graph_tokens_per_second"] is None and plan["estimate_error"] == 0.11
    text = format_plan(plan)
    assert "on 8 h100, passes as one CUDA graph, estimated" in text and "train.cuda_graph" not in text
    eager = make_plan("pretrain_1b2", ["train.cuda_graph=false"], 8, _hardware(8))
    assert not eager["cuda_graph"] and "on 8 h100, estimated" in format_plan(eager)
    assert eager["graph_tokens_per_second"] == plan["estimate"]["tokens_per_second"]
    tensor = make_plan("pretrain_1b2", ["parallel.tensor=2"], 8, _hardware(8))
    assert not tensor["cuda_graph"] and tensor["graph_tokens_per_second"] is None
    compared = make_comparison(["pretrain_mla_1b2", "pretrain_1b2"], [], 8, _hardware(8))["plans"]
    assert all(each["cuda_graph"] for each in compared.values())


def test_time_and_cost_follow_from_the_step() -> None:
    settings = ["parallel.gate_group=4", "train.cuda_graph=false"]
    plan = make_plan("pretrain_base", settings, 8, _hardware(8, price=2.5))
    found, budget = plan["estimate"], plan["budget"]
    assert plan["steps"] == 127_157 and plan["tokens"] == 127_157 * 384 * 1024
    assert found["tokens_per_second"] == pytest.approx(384 * 1024 / found["step_s"])
    assert found["mfu"] == pytest.approx(
        plan["flops_per_token_forward_backward"] * found["tokens_per_second"] / 8 / 900e12
    )
    assert budget["gpu_hours"] == pytest.approx(127_157 * found["step_s"] / 3600 * 8)
    assert budget["cost"] == pytest.approx(2.5 * budget["gpu_hours"]) and budget["days"] * 24 * 8 == budget["gpu_hours"]
    assert plan["graph_tokens_per_second"] > found["tokens_per_second"]  # the host limits this one
    text = format_plan(plan)
    table = text[text.index("a step of ") : text.index("tokens/s")].splitlines()[1:-1]
    *parts, step = [float(re.sub(r" ms.*", "", line[36:]).replace(",", "")) for line in table if line[36:].strip()]
    assert sum(parts) == pytest.approx(step, abs=0.5) and len(parts) == 7 and min(parts) < 0
    assert "give or take 20%" in text and re.search(r"tokens/s +[1-9]\d?0*(,000)* ", text)
    for part in ("host launches", "<- the limit", "MFU", "recompute none; selective", "gate rows", "at 2.5 a GPU-hour"):
        assert part in text
    assert "GB/s a GPU inside a node (data sheet" in text and "GB/s a node of" not in text
    assert "GB/s a node of 8 (data sheet" in format_plan(make_plan("pretrain_base", [], 16, _hardware(16)))
    assert "cost" not in format_plan(make_plan("pretrain_base", [], 8, _hardware(8)))


def test_no_estimate_without_its_numbers() -> None:
    plan = make_plan("pretrain_base", [], 8, _hardware(8, name="mine"))
    assert plan["estimate"] is None and plan["fits"]
    assert "no estimate of the step time: give --gpu-memory-gb-per-s" in format_plan(plan)
    assert make_plan("quickstart", [], 2, _hardware(2))["estimate"] is None  # fp32


def test_fp8_is_not_estimated() -> None:
    settings = ["train.fp8=tensorwise", "parallel.implementation=te"]
    text = format_plan(make_plan("pretrain_1b2", settings, 8, _hardware(8)))
    assert "no estimate of the step time: set train.fp8=none: steps in FP8 are not estimated (measured on" in text
    assert "linear layers in FP8; CUDA and NCCL" in text
    text = format_search(make_search("pretrain_1b2", settings, 8, _hardware(8)))
    assert "speed not estimated: set train.fp8=none" in text and "tokens/s" not in text


def test_comparison_of_two_configurations() -> None:
    compared = make_comparison(["pretrain_mla_1b2", "pretrain_1b2"], [], 8, _hardware(8))
    text = format_comparison(compared)
    lines: dict[str, Any] = {line[:34].strip(): line[34:].split() for line in text.splitlines()}
    assert lines["KV cache, bytes a token"] == ["27,648", "9,216", "0.333"]
    assert lines["gating tables (M)"] == ["0.0", "618.1", "-"]
    one, two = (plan["estimate"]["tokens_per_second"] for plan in compared["plans"].values())
    assert lines["tokens/s (estimated)"][2] == f"{two / one:.3f}"
    assert "tokens/s" not in format_comparison(make_comparison(["pretrain_mla_1b2", "pretrain_1b2"], [], None, None))
    same = make_comparison(["pretrain_base", "pretrain_base"], [], None, None)
    assert len(same["plans"]) == 1 and "1.000" in format_comparison(same)


def test_a_mistake_is_one_line_and_exit_code_2(root: Path) -> None:
    mistakes: tuple[tuple[str, ...], ...] = (
        ("quickstart", "model.kv_emb_dims=3"),
        ("quickstart", "model.kv_emb_dim=0"),
        ("quickstart", "--world-size", "3"),
        ("gone.yaml",),
        (),
        ("--compare", "pretrain_base", "gone"),
        ("--compare", "pretrain_base", "pretrain_1b2", "--search"),
        ("pretrain_base", "--gpus", "8", "--gpu", "b200"),
        ("pretrain_base", "--gpus", "8", "--gpu", "a100", "train.fp8=tensorwise", "parallel.implementation=te"),
        ("pretrain_base", "--gpu", "h100"),
        ("pretrain_base", "--gpus", "8", "--gpu-hour-price", "2"),
        ("pretrain_base", "--gpus", "8", "--gpu", "h100", "--gpu-hour-price", "-2"),
        ("pretrain_base", "--gpus", "8", "--gpu", "h100", "--gpu-hour-price", "nan"),
        ("pretrain_base", "--gpus", "8", "--gpu", "h100", "--link-gb-per-s", "0"),
        ("pretrain_base", "--gpus", "8", "--gpu", "h100", "--nvlink-gb-per-s", "inf"),
        ("pretrain_base", "--gpus", "8", "--gpu", "h100", "--gpus-per-node", "0"),
        ("pretrain_base", "--gpus", "8", "--gpu", "mine", "--gpu-memory-gib", "80", "--gpu-tflops", "-1"),
    )
    for arguments in mistakes:
        done = _plan(root, *arguments)
        assert done.returncode == 2, (arguments, done.stderr)
        assert done.stdout == ""
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1


def _ends(root: Path, body: str) -> subprocess.CompletedProcess[str]:
    code = (
        f"from egmla_megatron.cli import run_main\nfrom egmla_megatron.errors import UserError\n{body}\nrun_main(main)"
    )
    return subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)


def test_how_mains_end(root: Path) -> None:
    done = _ends(root, "def main(): raise UserError('two\\n  lines')")
    assert (done.returncode, done.stderr) == (2, "error: two lines\n")
    assert _ends(root, "def main(): raise KeyboardInterrupt").returncode == 130
    assert _ends(root, "def main(): return 3").returncode == 3
    assert _ends(root, "def main(): pass").returncode == 0
    bug = _ends(root, "def main(): raise ValueError('bug')")
    assert bug.returncode == 1
    assert "Traceback" in bug.stderr


def test_a_reader_that_goes_away_is_no_error(root: Path) -> None:
    body = "import signal\ndef main():\n    for _ in range(100000): print('x' * 100)"
    code = f"from egmla_megatron.cli import run_main\n{body}\nrun_main(main)"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=30) == 0
