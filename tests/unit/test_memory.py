"""Predicted memory against what GPUs held at their peak (the project's own records), and against what a model saves."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from egmla_megatron.config.check import check_config
from egmla_megatron.config.load import load_config
from egmla_megatron.config.schema import ModelConfig
from egmla_megatron.config.to_mcore import transformer_config
from egmla_megatron.errors import UserError
from egmla_megatron.report.cards import Card, find_card, find_cluster
from egmla_megatron.report.memory import Memory, memory_per_rank, unique_fraction, worst_stage
from egmla_megatron.report.plan import Hardware, make_search
from egmla_megatron.report.show_plan import format_search
from tests.recorded_steps import WHOLE_MASTER_WEIGHTS
from tests.tiny import tiny_run

BEFORE = ["parallel.unique_ids=false"]  # runs before distinct ids and kernels
NO_OVERLAP = ["parallel.overlap_param_gather=false", "parallel.overlap_grad_reduce=false"]
TWO = {  # name of a run in layouts_two_gpus.json without the implementation -> settings
    "gate_group_2_overlap_grad_reduce_true_overlap_param_gather_true": ["parallel.gate_group=2"],
    "pipeline_2": ["parallel.pipeline=2", *NO_OVERLAP],
    "tensor_2": ["parallel.tensor=2"],
    "tensor_2_sequence_true_gate_group_2": ["parallel.tensor=2", "parallel.sequence=true", "parallel.gate_group=2"],
}


def _records(root: Path, name: str) -> Any:
    return json.loads((root / "tools" / "records" / f"{name}.json").read_text())


def _predicted_mib(
    config: str, ranks: int, overrides: list[str], *, te: bool, triton: bool, copied: bool = True
) -> float:
    """Of the worst stage; `copied`: when cross-entropy still copied the logits."""
    cfg = load_config(config, [f"train.global_batch_size={8 * max(ranks, 2)}", WHOLE_MASTER_WEIGHTS, *overrides])
    layout = check_config(cfg, ranks)
    stages = [memory_per_rank(cfg, layout, stage, te=te, triton=triton) for stage in range(layout.pp)]
    assert max(each.total for each in stages) == worst_stage(cfg, layout, te=te, triton=triton)[1].total
    return max(each.total + (_copy_of_logits(each) if te and copied else 0) for each in stages) / 2**20


def _copy_of_logits(memory: Memory) -> int:
    """Bytes that were held besides in all records before speed_device_adam.json: the logits were copied.

    The peak then lay in forward, at two of them, when the head's gradients are not there yet.
    """
    return max(0, memory.logits - memory.temporary) if memory.logits else 0


def _close(predicted: float, measured: float, what: str) -> None:
    print(f"{what}: predicted {predicted:.0f}, measured {measured:.0f} MiB, {predicted / measured - 1:+.1%}")
    assert -0.02 < predicted / measured - 1 < 0.05, what


@pytest.mark.parametrize("implementation", ["te", "torch"])
def test_layouts_on_gpus(root: Path, implementation: str) -> None:
    runs = _records(root, "layouts_two_gpus")["runs"]
    te = implementation == "te"
    for name, settings in TWO.items():
        predicted = _predicted_mib("pretrain_base", 2, [*BEFORE, *settings], te=te, triton=False)
        _close(predicted, runs[f"two_{implementation}_{name}"]["peak_mib"], f"{implementation} {name}")
    for run in _records(root, "first_gpu_runs")["runs"]:
        if run["hardware"].startswith("1 x") and run["implementation"] == implementation and run.get("command"):
            predicted = _predicted_mib(run["run"].split(",")[0], 1, BEFORE, te=te, triton=False)
            _close(predicted, run["peak_memory_mib"], f"{run['run']} {implementation}")


def test_kernels_and_distinct_ids_on_gpus(root: Path) -> None:
    for row in _records(root, "kernels_and_graphs")["kernels"]["rows"]:
        predicted = _predicted_mib("pretrain_base", 1, [], te=True, triton=row["kernels"] == "triton")
        _close(predicted, row["peak_mib"], row["kernels"])
    checked = 0
    for result in _records(root, "sharding_two_gpus")["results"]:
        if not result["name"].startswith(("kernels_", "zipf_")):
            continue
        sharded = str(result["settings"]["distributed_optimizer"]).lower()
        for row in result["rows"]:
            settings = [f"optimizer.distributed={sharded}", f"parallel.overlap_param_gather={sharded}"]
            settings += [f"parallel.gate_group={row['gate_group']}"]
            settings += [f"parallel.grad_reduce_dtype={result['settings']['gradients']}"]
            settings += BEFORE if "unique" not in row["variant"] and row["variant"] == "vanilla" else []
            settings += BEFORE if row["variant"].endswith("no_unique") else []
            predicted = _predicted_mib("pretrain_base", 2, settings, te=True, triton=True)
            _close(predicted, row["peak_mib"], f"{result['name']} {row['variant']}")
            checked += 1
    assert checked >= 8


def test_one_gpu(root: Path) -> None:
    measured = _records(root, "speed_one_gpu")["bench_train"]
    for title, rows in measured.items():
        for row in rows if title.startswith("pretrain") else ():
            graph = ["train.cuda_graph=true", *row["settings"]]
            predicted = _predicted_mib(title.partition(",")[0], 1, graph, te=True, triton=True)
            _close(predicted, row["peak_mib"], f"{title} {row['variant']}")


def test_what_fp8_changes(root: Path) -> None:
    """Copies of weights in FP8, inputs of GEMMs kept in FP8 instead of bf16; beside bf16 in the same call."""
    before, now = (_records(root, name)["bench_train"] for name in ("speed_one_gpu", "speed_sequences"))
    for config, rows, bf16, fp8 in (
        ("pretrain_1b2", before["pretrain_1b2"], "graph", "fp8+graph"),
        ("pretrain_base", before["pretrain_base"], "base", "fp8"),
        ("pretrain_1b2", now["1.2B, fp8"]["rows"], "base", "fp8"),
    ):
        peaks = {row["variant"]: row["peak_mib"] for row in rows}
        settings = ["train.cuda_graph=true"] if "graph" in bf16 else ["train.cuda_graph=false"]
        plain, cast = (
            _predicted_mib(config, 1, [*settings, f"train.fp8={kind}"], te=True, triton=True)
            for kind in ("none", "tensorwise")
        )
        change = peaks[fp8] - peaks[bf16]
        print(f"{config}: predicted {cast - plain:+.0f}, measured {change:+.0f} MiB")
        assert abs(cast - plain - change) < 250 and (cast > plain) == (change > 0)


@pytest.mark.parametrize("name", ["speed_device_adam", "speed_table_rows"])
def test_one_gpu_without_a_copy_of_the_logits(root: Path, name: str) -> None:
    measured = _records(root, name)["bench_train"]
    for title, rows in measured.items():
        for row in rows:
            graph = ["train.cuda_graph=true", *row["settings"]]
            predicted = _predicted_mib(title.partition(",")[0], 1, graph, te=True, triton=True, copied=False)
            _close(predicted, row["peak_mib"], f"{title} {row['variant']}")


def test_lower_halves_of_master_weights_and_two_gpus(root: Path) -> None:
    halves, two = (_records(root, name) for name in ("speed_remainders", "speed_two_gpus"))
    runs = [(1, halves["bench_train"], "true"), (1, halves["bench_train_with_whole_master_weights"], "false")]
    runs += [(2, two["bench_train"], "false"), (2, two["tensor_parallel"], "false")]
    for ranks, measured, remainders in runs:
        for title, rows in measured.items():
            for row in rows:
                kept = [f"optimizer.store_param_remainders={remainders}"]
                graph = f"train.cuda_graph={str('parallel.tensor=2' not in row['settings']).lower()}"
                batch = f"train.global_batch_size={16 if ranks == 2 and 'true' in graph else 8}"
                settings = [*kept, graph, batch, *row["settings"]]
                predicted = _predicted_mib(title, ranks, settings, te=True, triton=True, copied=False)
                _close(predicted, row["peak_mib"], f"{ranks} {title} {row['variant']}")


def test_layouts_and_recompute(root: Path) -> None:
    for run in _records(root, "memory_layouts")["runs"]:
        # heads on several ranks had no kernel for gate and norm when these ran
        triton = not any(setting.startswith("parallel.tensor=") for setting in run["settings"])
        predicted = _predicted_mib(run["config"], run["ranks"], run["settings"], te=True, triton=triton)
        _close(predicted, run["peak_mib"], f"{run['config']} {run['ranks']} {run['settings']}")


WIDE = ModelConfig(
    num_layers=2,
    hidden_size=96,
    num_attention_heads=4,
    intermediate_size=240,
    qk_nope_head_dim=24,
    qk_rope_head_dim=16,
    v_head_dim=40,  # as wide as keys: the flash kernel, which keeps no scores
    kv_lora_rank=48,
    kv_emb_dim=32,
    vocab_size=64,
    max_position_embeddings=64,
)


@pytest.mark.parametrize("model", [WIDE, replace(WIDE, gate="none", kv_emb_dim=0), replace(WIDE, gate_norm=False)])
def test_what_a_layer_saves(world: Any, model: ModelConfig) -> None:
    """Tensors that autograd really keeps on the CPU, for two more layers than the same model has."""
    found = {}
    for layers in (2, 4):
        deep = replace(model, num_layers=layers)
        cfg = tiny_run(deep, train={"seq_length": 64, "micro_batch_size": 4, "global_batch_size": 4})
        cfg = replace(cfg, parallel=replace(cfg.parallel, unique_ids=False))
        memory = memory_per_rank(cfg, check_config(cfg, 1), 0, te=False, triton=False)
        found[layers] = (_saved_bytes(cfg, world), memory.activations)
    really, predicted = (found[4][which] - found[2][which] for which in (0, 1))
    # a CPU's RMSNorm is made of single operations and keeps the normalised input, a GPU's does not
    predicted += 2 * 4 * 64 * 4 * (2 * model.hidden_size + model.kv_lora_rank)
    print(f"two layers keep {really} bytes, predicted {predicted}: {predicted / really - 1:+.1%}")
    assert predicted == pytest.approx(really, rel=0.03)


def _saved_bytes(cfg: Any, world: Any) -> int:
    """Of a forward pass, each storage once, without parameters."""
    import torch

    from egmla_megatron.model.build import build_model

    built = build_model(cfg, world)
    weights = {parameter.untyped_storage().data_ptr() for parameter in built.module.parameters()}
    kept: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage  # kept alive, so that no address comes twice
        return tensor

    ids = torch.randint(cfg.model.vocab_size, (cfg.train.micro_batch_size, cfg.train.seq_length))
    positions = torch.arange(cfg.train.seq_length).expand_as(ids)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        built.wrapped[0](ids, positions, None, labels=ids)
    return sum(storage.nbytes() for storage in kept.values())


def test_pipeline_stages_keep_what_they_hand_on(world: Any) -> None:
    """megatron-core frees a stage's outputs behind their sending only where it is told to, and it is not."""
    settings = ["parallel.pipeline=2", "train.global_batch_size=64", *NO_OVERLAP]
    cfg = load_config("pretrain_base", settings)
    layout = check_config(cfg, 2)
    held = [memory_per_rank(cfg, layout, stage, te=True, triton=True).communication for stage in range(2)]
    output = 2 * 8 * 1024 * 768
    assert not transformer_config(cfg, "torch", "flash").deallocate_pipeline_outputs
    assert held == [2 * output, 0]


def test_distinct_ids_fall_with_tokens() -> None:
    shares = [unique_fraction(tokens) for tokens in (16, 1000, 4096, 8192, 12_000, 65_536, 1 << 20)]
    assert shares == sorted(shares, reverse=True) and shares[0] <= 1.0 and shares[3] == 0.21


def _with_links(card: Card, gpus: int) -> Hardware:
    return Hardware(card, find_cluster(card, gpus, None, None, None))


def test_search_finds_what_fits() -> None:
    found = make_search("pretrain_1b2", [], 8, _with_links(find_card("h100", None, None), 8))
    best = found["layouts"][0]
    assert best["train.recompute"] == "none" and best["parallel.tensor"] == best["parallel.pipeline"] == 1
    assert all(layout["memory_gib"] < 79.2 for layout in found["layouts"])
    speeds = [layout["tokens_per_second"] for layout in found["layouts"]]
    assert speeds == sorted(speeds, reverse=True) and "by estimated tokens/s" in format_search(found)
    assert best["train.cuda_graph"] == "true" and "train.cuda_graph=true" in format_search(found)
    assert {layout["estimate_error"] for layout in found["layouts"]} == {0.11, 0.2}
    graphs = [layout for layout in found["layouts"] if layout["train.cuda_graph"] == "true"]
    assert 0 < len(graphs) < len(found["layouts"])
    assert all(each["parallel.tensor"] == 1 and each["train.recompute"] == "none" for each in graphs)
    assert re.search(r" [1-9]\d?0*(,000)+ tokens/s \+-11% ", format_search(found))
    deterministic = make_search(
        "pretrain_1b2", ["run.deterministic=true"], 8, _with_links(find_card("h100", None, None), 8)
    )
    assert all(layout["train.cuda_graph"] == "false" for layout in deterministic["layouts"])
    small = make_search("pretrain_1b2", [], 8, _with_links(find_card("small", 24.0, 100.0), 8))
    assert 0 < len(small["layouts"]) < len(found["layouts"])
    assert "tokens_per_second" not in small["layouts"][0] and "nothing computed twice first" in format_search(small)
    none = make_search("pretrain_1b2", [], 1, _with_links(find_card("tiny", 8.0, 10.0), 1))
    assert "nothing fits" in format_search(none)


def test_unknown_cards_need_their_numbers() -> None:
    with pytest.raises(UserError, match="--gpu: got b200, allowed h100"):
        find_card("b200", 180.0, None)
