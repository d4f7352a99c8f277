"""The comparison of training speeds: which variants there are, and a whole run on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from egmla_megatron.bench import train_variants
from egmla_megatron.bench.schedule import Schedule
from egmla_megatron.bench.train_variants import (
    VARIANTS,
    checked_variant,
    choose_variants,
    precision_remark,
    same_as,
    train_config,
)
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


@pytest.mark.parametrize(
    ("own", "settings"),
    [
        ("a.b=1", ["a.b=1"]),
        ("profile.steps=[1,2],profile.ranks=[0]", ["profile.steps=[1,2]", "profile.ranks=[0]"]),
        ("data.train=a,b,train.steps=3", ["data.train=a,b", "train.steps=3"]),
        ("data.train=['a,x.y=1',b],train.steps=3", ["data.train=['a,x.y=1',b]", "train.steps=3"]),
        ('run.name="x,a.b=1",train.steps=3', ['run.name="x,a.b=1"', "train.steps=3"]),
        ("a.b=1, c.d=2", ["a.b=1", " c.d=2"]),
        ("a.b=[1,c.d=2", ["a.b=[1,c.d=2"]),
    ],
)
def test_commas_of_values_separate_no_settings(own: str, settings: list[str]) -> None:
    (found,) = choose_variants([f"mine:{own}"])
    assert list(found.settings) == settings


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("graph", ["graph (which sets train.cuda_graph=true)", "train.cuda_graph: got true"]),
        ("mla+graph", ["mla+graph (which sets model.gate=none model.kv_emb_dim=0 train.cuda_graph=true)"]),
        ("fp8", ["fp8 (which sets train.fp8=tensorwise)"]),
        ("te", ["te (which sets parallel.implementation=te)"]),
        ("mine:parallel.attention_backend=cudnn", ["mine (which sets parallel.attention_backend=cudnn)"]),
        ("mine:train.stepz=1", ["mine (which sets train.stepz=1) cannot run: override 'train.stepz=1': unknown key"]),
    ],
)
def test_what_cannot_run_names_the_variant(name: str, parts: list[str]) -> None:
    (variant,) = choose_variants([name])
    with pytest.raises(UserError) as caught:
        checked_variant("quickstart", SMALL, variant, Schedule(1, 2, 0), 1, cuda=False)
    message = str(caught.value)
    assert message.startswith("--variants: ") and all(part in message for part in parts)
    assert "auto" not in message.rpartition("; ")[2]  # the variant is there for its setting
    if "stepz" not in name:
        assert message.endswith(f"leave {variant.name} out of --variants, or change it")


def test_a_mistake_that_is_not_the_variants() -> None:
    with pytest.raises(UserError, match=r"^train\.global_batch_size .*fix: set train\.global_batch_size"):
        batch = [*SMALL, "train.micro_batch_size=2", "train.global_batch_size=3"]
        checked_variant("quickstart", batch, VARIANTS["base"], Schedule(1, 2, 0), 1, cuda=False)
    with pytest.raises(UserError, match=r"mla .*fix: set parallel\.gate_group=1$"):
        checked_variant("quickstart", ["parallel.gate_group=2"], VARIANTS["mla"], Schedule(1, 2, 0), 2, cuda=False)


def test_another_precision_than_the_configurations_is_said() -> None:
    cfg = train_config("pretrain_base", [], VARIANTS["base"], Schedule(1, 2, 0), cuda=False)
    remark = precision_remark("pretrain_base", [], cfg)
    assert remark.startswith("No CUDA device: computed in fp32, where pretrain_base has train.precision=bf16")
    asked = ["train.precision=bf16"]
    cfg = train_config("pretrain_base", asked, VARIANTS["base"], Schedule(1, 2, 0), cuda=False)
    assert cfg.train.precision == "bf16" and precision_remark("pretrain_base", asked, cfg) == ""


def test_variants_that_change_nothing_on_a_cpu() -> None:
    names = [name for name in VARIANTS if name not in ("graph", "te", "fp8")]
    configs = {
        each: train_config("quickstart", SMALL, each, Schedule(1, 2, 0), cuda=False)
        for each in choose_variants([*names, "reported+no_step_times", "mla+no_gate_norm"])
    }
    found = {one.name: other.name for one, other in same_as(configs, cuda=False).items()}
    nothing = (
        "torch_kernels",
        "torch",
        "no_fused_grads",
        "own_master_weights",
        "whole_master_weights",
        "no_step_times",
    )
    assert found == dict.fromkeys(nothing, "base") | {"mla+no_gate_norm": "mla"}


def test_the_same_variants_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_variants, "find_spec", lambda _: object())
    configs = {
        each: train_config("pretrain_base", [], each, Schedule(1, 2, 0), cuda=True)
        for each in choose_variants([name for name in VARIANTS if name != "fp8"])
    }
    found = {one.name: other.name for one, other in same_as(configs, cuda=True).items()}
    assert found == {"te": "base", "no_step_times": "base"}


def test_a_whole_run(tmp_path: Path) -> None:
    command = ["tools/bench_train.py", "quickstart", *SMALL, "--steps=3", "--warmup=1", "--rounds=2"]
    command += [
        "--variants",
        "base",
        "mla",
        "torch",
        "twice:train.global_batch_size=4",
        "reported",
        "reported+no_step_times",
    ]
    command += [f"--json={tmp_path / 'out.json'}"]
    output = start(1, command, tmp_path / "log").succeed()
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == ["base", "mla", "torch", "twice", "reported", "reported+no_step_times"]
    assert [row["same_as"] for row in rows] == [None, None, "base", None, None, None]
    assert "torch (parallel.implementation=torch) changes nothing here: it computes what base does." in output
    assert "No CUDA device" not in output  # its precision is fp32 anyway
    assert [row["n"] for row in rows] == [6] * 6
    assert [row["reported"] for row in rows] == [False] * 4 + [True] * 2
    for row in rows:
        tokens = 32 * (2 if row["variant"] == "twice" else 1)
        assert row["tokens_per_second"] == pytest.approx(tokens / (row["step_ms_median"] / 1e3), rel=1e-3)
        assert row["speed_to_first"] == pytest.approx(row["tokens_per_second"] / rows[0]["tokens_per_second"], rel=1e-4)
        assert row["loss_first"] != row["loss_last"]
    assert rows[4]["loss_last"] == rows[5]["loss_last"] == rows[0]["loss_last"]
    assert output.count("step       4/") == 4  # reported: two variants, two rounds
    assert rows[0]["tflops_per_second_per_rank"] > 0
    assert "| base | " in output and "x base" in output
    lines = [line.strip("| ").split(" | ") for line in output.splitlines() if line.startswith("| ")]
    head, first = lines[0], lines[2]
    assert "predicted" not in head and len(head) == len(first)
    assert first[head.index("resident MiB")] == f"{rows[0]['peak_rss_mib']:,.0f}"
