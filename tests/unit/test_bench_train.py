"""The comparison of training speeds: which variants there are, and a whole run on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from egmla_megatron.bench.schedule import Schedule
from egmla_megatron.bench.train_variants import VARIANTS, choose_variants, train_config
from egmla_megatron.errors import UserError
from tests.dist.harness import start

SMALL = [
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.num_attention_heads=2",
    "model.intermediate_size=48",
    "model.vocab_size=128",
    "train.seq_length=16",
    "train.global_batch_size=2",
    "train.micro_batch_size=1",
    "parallel.gate_group=1",
]


def test_variants_are_settings_by_name() -> None:
    base, both, own = choose_variants(["base", "mla+graph", "mine:model.kv_lora_rank=7,train.recompute=full"])
    assert base.settings == ()
    assert both.settings == (*VARIANTS["mla"].settings, *VARIANTS["graph"].settings)
    assert [each.reported for each in choose_variants(["mla+reported", "mla", "reported"])] == [True, False, True]
    assert own.name == "mine" and own.settings == ("model.kv_lora_rank=7", "train.recompute=full")
    cfg = train_config("quickstart", ["model.kv_lora_rank=16"], own, Schedule(1, 2, 0), cuda=False)
    assert cfg.model.kv_lora_rank == 7 and cfg.train.steps == Schedule(1, 2, 0).total == 6 and cfg.data.train == ()


def test_a_graph_is_measured_only_where_it_is_asked_for(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("model:\n  name: x\ntrain:\n  cuda_graph: true\n")
    for config, overrides, name, graph in (
        ("pretrain_base", [], "base", False),
        (str(own), [], "base", False),
        ("pretrain_base", [], "graph", True),
        ("pretrain_base", ["train.cuda_graph=true"], "mla", True),
        ("pretrain_base", ["train.cuda_graph=auto"], "base", True),
        ("pretrain_base", ["train.cuda_graph=auto"], "recompute", False),
    ):
        cfg = train_config(config, overrides, VARIANTS[name], Schedule(1, 2, 0), cuda=True)
        assert cfg.train.cuda_graph is graph, (config, overrides, name)


@pytest.mark.parametrize("words", [["mal"], ["base", "base"], ["mla+"], ["x:"], [":a=1"]])
def test_other_names_are_refused(words: list[str]) -> None:
    with pytest.raises(UserError, match="--variants: got"):
        choose_variants(words)


def test_a_whole_run(tmp_path: Path) -> None:
    command = ["tools/bench_train.py", "quickstart", *SMALL, "--steps=3", "--warmup=1", "--rounds=2"]
    command += ["--variants", "base", "mla", "twice:train.global_batch_size=4", "reported", "reported+no_step_times"]
    command += [f"--json={tmp_path / 'out.json'}"]
    output = start(1, command, tmp_path / "log").succeed()
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == ["base", "mla", "twice", "reported", "reported+no_step_times"]
    assert [row["n"] for row in rows] == [6] * 5
    assert [row["reported"] for row in rows] == [False] * 3 + [True] * 2
    for row in rows:
        tokens = 32 * (2 if row["variant"] == "twice" else 1)
        assert row["tokens_per_second"] == pytest.approx(tokens / (row["step_ms_median"] / 1e3), rel=1e-3)
        assert row["speed_to_first"] == pytest.approx(row["tokens_per_second"] / rows[0]["tokens_per_second"], rel=1e-4)
        assert row["loss_first"] != row["loss_last"]
    assert rows[3]["loss_last"] == rows[4]["loss_last"] == rows[0]["loss_last"]
    assert output.count("step       4/") == 4  # reported: two variants, two rounds
    assert rows[0]["tflops_per_second_per_rank"] > 0
    assert "| base | " in output and "x base" in output
    lines = [line.strip("| ").split(" | ") for line in output.splitlines() if line.startswith("| ")]
    head, first = lines[0], lines[2]
    assert "predicted" not in head and len(head) == len(first)
    assert first[head.index("resident MiB")] == f"{rows[0]['peak_rss_mib']:,.0f}"
