"""What the benchmark's command line accepts, and what it means."""

from __future__ import annotations

import pytest

from egmla_megatron.bench.options import base_config, parse_options
from egmla_megatron.bench.plan import make_plan
from egmla_megatron.bench.rate import bits_per_second
from egmla_megatron.bench.variants import VARIANTS, chosen, variant_config
from egmla_megatron.config.check import check_config
from egmla_megatron.config.to_mcore import ddp_config
from egmla_megatron.errors import UserError
from tests.tiny import tiny_run


def test_without_options_it_is_the_papers_case() -> None:
    options = parse_options([])
    cfg = base_config(options, 4, cuda=True, steps=30)
    assert (cfg.model.name, cfg.train.micro_batch_size, cfg.train.seq_length) == ("eg_mla_base_kv64", 8, 1024)
    assert (cfg.train.global_batch_size, cfg.train.precision, cfg.optimizer.distributed) == (32, "bf16", False)
    assert cfg.parallel.overlap_grad_reduce and cfg.parallel.grad_reduce_dtype == "fp32"
    assert not cfg.data.train and not cfg.data.valid
    check_config(cfg, 4)


def test_options_reach_the_configuration() -> None:
    words = "--config pretrain_base --sequences 2 --gradients bf16 --no-overlap --distributed-optimizer --seed 5"
    options = parse_options([*words.split(), "--data", "some/text", "model.num_layers=2"])
    cfg = base_config(options, 2, cuda=True, steps=30)
    assert (cfg.model.num_layers, cfg.train.global_batch_size, cfg.run.seed) == (2, 4, 5)
    assert cfg.data.train == ("some/text",)
    assert cfg.optimizer.distributed and not cfg.parallel.overlap_grad_reduce
    assert not ddp_config(cfg).grad_reduce_in_fp32
    assert ddp_config(tiny_run()).grad_reduce_in_fp32


@pytest.mark.parametrize(("override", "graph"), [([], False), (["true"], True), (["auto"], True), (["false"], False)])
def test_a_graph_is_measured_only_where_it_is_asked_for(override: list[str], graph: bool) -> None:
    words = ["--config", "pretrain_base", *(f"train.cuda_graph={value}" for value in override)]
    plan = make_plan(parse_options(words), 2, cuda=True)
    assert {cfg.train.cuda_graph for cfg in plan.configs.values()} == {graph}


def test_a_cpu_computes_in_fp32_unless_told_otherwise() -> None:
    assert base_config(parse_options([]), 2, cuda=False, steps=9).train.precision == "fp32"
    told = base_config(parse_options(["train.precision=bf16"]), 2, cuda=False, steps=9)
    assert told.train.precision == "bf16"


def test_nodes_on_this_machine_have_a_model_of_their_own() -> None:
    options = parse_options(["--nodes-on-this-machine", "4"])
    plan = make_plan(options, 4, cuda=False)
    assert (plan.base.model.name, options.link) == ("bench_nodes", "400mbit")
    assert [layout.gate_group for layout in plan.layouts.values()] == [1, 1, 4, 4, 4, 4, 4]


def test_variants_differ_in_their_switches_only() -> None:
    base = base_config(parse_options([]), 2, cuda=True, steps=9)
    parallel = {name: variant_config(base, each, 2).parallel for name, each in VARIANTS.items()}
    assert len({str(each) for each in parallel.values()}) == len(VARIANTS) == 7
    paper = parallel["dimension_wise_all_gather_no_unique"]
    assert (paper.gate_group, paper.gate_exchange, paper.unique_ids) == (2, "all_gather", False)
    assert parallel["dimension_wise_all_to_all_per_layer"].gate_granularity == "per_layer"
    assert parallel["vanilla"].gate_group == parallel["vanilla_unique"].gate_group == 1
    assert [each.name for each in chosen("dimension_wise_all_gather, vanilla")] == [
        "vanilla",
        "dimension_wise_all_gather",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--variants", "vanila"], "allowed all, or some of vanilla"),
        (["--variants", ","], "got no name"),
        (["--steps", "0"], "--steps: got 0"),
        (["--step", "5"], "command line"),
        (["--gradients", "fp16"], "command line"),
        (["--plot", "figure.pdf"], ".png or .svg"),
        (["--json", "no/such/folder/x.json"], "make no/such/folder"),
        (["--link", "1gbit"], "only with --nodes-on-this-machine"),
        (["--nodes-on-this-machine", "1"], "allowed 2 to 64"),
        (["--nodes-on-this-machine", "2", "--link", "fast"], "write it like 400mbit"),
        (["--nodes-on-this-machine", "2", "--slow-link"], "leave one out"),
        (["parallel.unique_ids=false"], "choose by --variants"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said.replace(".", r"\.").replace("--", "--")):
        parse_options(words)


@pytest.mark.parametrize(
    ("words", "ranks", "said"),
    [
        ([], 1, "ranks: got 1"),
        (["--config", "mla_base_kv256"], 2, "a model with gating tables"),
        (["parallel.tensor=2"], 2, "all ranks are data-parallel"),
        (["--config", "nothing"], 2, "is not there"),
        (["--gradients", "bf16"], 2, "gradients of fp32 weights are fp32"),
        ([], 3, "does not divide model.kv_emb_dim"),
    ],
)
def test_a_plan_that_cannot_run_is_refused_before_anything_starts(words: list[str], ranks: int, said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_plan(parse_options(words), ranks, cuda=False)


def test_one_rank_may_measure_replicated_tables() -> None:
    assert make_plan(parse_options(["--variants", "vanilla"]), 1, cuda=False).schedule.counted_step == 27


def test_rates() -> None:
    assert bits_per_second("400mbit") == 4e8 and bits_per_second("3.1Gbit") == 3.1e9
    for wrong in ("400", "0mbit", "1kbit", "400 mbit", "-1gbit", "400mbps"):
        with pytest.raises(UserError):
            bits_per_second(wrong)
