"""Every rule of the checks: what passes, what is refused, and that the proposed fix works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from egmla_megatron.config.check import Layout, check_config
from egmla_megatron.config.load import load_config
from egmla_megatron.config.workable import nearest, nearest_multiple
from egmla_megatron.errors import UserError

_MHA = ["model.attention=mha", "model.gate=none", "model.kv_emb_dim=0"]
_PLAIN = ["model.gate=none", "model.kv_emb_dim=0"]


def _check(overrides: list[str], world_size: int = 1, config: str = "pretrain_base") -> Layout:
    return check_config(load_config(config, overrides), world_size)


def test_layout() -> None:
    overrides = ["parallel.tensor=2", "parallel.pipeline=2", "parallel.gate_group=4", "train.micro_batch_size=4"]
    assert _check(overrides, 16) == Layout(
        world_size=16,
        tp=2,
        pp=2,
        vp=1,
        cp=1,
        dp=4,
        gate_group=4,
        gate_data_parallel=2,
        num_microbatches=24,
        layers_per_stage=6,
    )


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    [
        ([], 1),
        (["parallel.gate_group=8"], 8),
        (["parallel.tensor=4", "parallel.gate_group=2", "parallel.sequence=true"], 4),
        (["parallel.pipeline=12"], 12),
        (["parallel.pipeline=2", "parallel.virtual_pipeline=3"], 2),
        (["parallel.context=2", "parallel.tensor=2", "parallel.sequence=true", "parallel.gate_group=4"], 8),
        (["model.q_lora_rank=6", "parallel.tensor=2"], 2),
        (_PLAIN, 3),
        (_MHA, 2),
        (["optimizer.schedule=wsd", "optimizer.decay_steps=100"], 1),
        (["data.valid=[]", "train.eval_interval=5"], 1),
        (["train.steps=10", "optimizer.warmup_steps=10"], 1),
    ],
)
def test_accepted(overrides: list[str], world_size: int) -> None:
    assert _check(overrides, world_size).world_size == world_size


# overrides, ranks, what the message must name, the fix it must propose
_REFUSED = [
    (["train.fp8=tensorwise", "train.recompute=full"], 1, "train.fp8=tensorwise with train.recompute", "fp8=none"),
    (["train.fp8=tensorwise", "parallel.tensor=2"], 2, "train.fp8=tensorwise with parallel.tensor", "fp8=none"),
    (["train.fp8=tensorwise", "model.kv_lora_rank=20"], 1, "train.fp8=tensorwise: model.kv_lora_rank", "fp8=none"),
    ([], 0, "number of ranks", "start at least one process"),
    (["parallel.tensor=2", "parallel.pipeline=2"], 6, "6 ranks for 2 x 2 x 1", "start 8 ranks"),
    (["parallel.tensor=5"], 5, "model.num_attention_heads = 12", "set parallel.tensor=4"),
    (["parallel.tensor=4", "model.intermediate_size=1922"], 4, "intermediate_size = 1922", "set parallel.tensor=2"),
    (["parallel.tensor=4", "model.vocab_size=50258"], 4, "vocab_size = 50258", "set parallel.tensor=2"),
    (["parallel.tensor=2", "model.kv_lora_rank=63"], 2, "qk_rope_head_dim = 127", "set parallel.tensor=1"),
    (["parallel.tensor=2", "model.q_lora_rank=7"], 2, "model.q_lora_rank = 7", "set parallel.tensor=1"),
    (["parallel.pipeline=5"], 5, "model.num_layers = 12", "set parallel.pipeline=6"),
    (["parallel.sequence=true"], 1, "parallel.sequence", "set parallel.sequence=false"),
    (
        ["parallel.sequence=true", "parallel.tensor=4", "train.seq_length=1022"],
        4,
        "train.seq_length",
        "set train.seq_length=1024",
    ),
    ([*_MHA, "train.seq_length=2048"], 1, "learned positions", "set train.seq_length=1024"),
    (["train.seq_length=2048"], 1, "RoPE is not scaled), model.max_position_embeddings", "set train.seq_length=1024"),
    ([*_PLAIN, "train.seq_length=1025"], 1, "model.max_position_embeddings", "set train.seq_length=1024"),
    (
        ["parallel.implementation=te", "train.precision=fp32"],
        1,
        "no fused fp32 attention",
        "set parallel.implementation=torch",
    ),
    (
        ["parallel.implementation=te", "parallel.attention_backend=math"],
        1,
        "attention kernel of torch",
        "set parallel.implementation=torch",
    ),
    (["parallel.gate_group=3"], 8, "8 ranks of one stage", "set parallel.gate_group=4"),
    (["parallel.gate_group=4", "parallel.pipeline=2"], 4, "2 ranks of one stage", "set parallel.gate_group=2"),
    (["parallel.gate_group=3"], 3, "model.kv_emb_dim = 256", "set parallel.gate_group=1"),
    (
        ["parallel.gate_group=3", "parallel.tensor=2", "model.kv_emb_dim=384", "train.global_batch_size=24"],
        6,
        "mixes replicas",
        "set parallel.gate_group=2",
    ),
    (
        ["parallel.gate_group=3", "parallel.context=2", "model.kv_emb_dim=384", "train.global_batch_size=24"],
        6,
        "mixes replicas",
        "set parallel.gate_group=2",
    ),
    ([*_PLAIN, "parallel.gate_group=2"], 2, "this model has none", "set parallel.gate_group=1"),
    ([*_MHA, "parallel.gate_group=2"], 2, "model.attention=mha", "set parallel.gate_group=1"),
    (["train.global_batch_size=100"], 4, "8 x 4", "set train.global_batch_size=96"),
    (["train.global_batch_size=1"], 4, "8 x 4", "set train.global_batch_size=32"),
    (["train.steps=100"], 1, "the run of 100 steps", "set optimizer.warmup_steps=10"),
    (["optimizer.schedule=wsd"], 1, "optimizer.decay_steps", "set optimizer.decay_steps="),
    (
        ["optimizer.schedule=wsd", "train.steps=1000", "optimizer.decay_steps=301"],
        1,
        "optimizer.decay_steps",
        "set optimizer.decay_steps=60",
    ),
    (
        ["parallel.overlap_param_gather=true", "optimizer.distributed=false"],
        1,
        "parallel.overlap_param_gather",
        "set parallel.overlap_param_gather=false",
    ),
    (
        ["parallel.attention_backend=te_fused", "parallel.implementation=torch"],
        1,
        "Transformer Engine",
        "set parallel.attention_backend=auto",
    ),
    (["parallel.context=2"], 3, "parallel.context", "start 4 ranks"),
    (["parallel.context=3"], 3, "2 x parallel.context = 6", "set train.seq_length=1026"),
    (
        ["parallel.context=2", "parallel.tensor=4", "parallel.sequence=true", "train.seq_length=1004"],
        8,
        "2 x parallel.context = 4 and parallel.context x parallel.tensor = 8 (parallel.sequence=true)",
        "set train.seq_length=1008",
    ),
    (["parallel.virtual_pipeline=2"], 1, "there is one", "set parallel.virtual_pipeline=1"),
    (
        ["parallel.virtual_pipeline=4", "parallel.pipeline=2"],
        2,
        "6 layers of a stage",
        "set parallel.virtual_pipeline=3",
    ),
    (
        ["parallel.virtual_pipeline=2", "parallel.pipeline=2", "train.global_batch_size=40"],
        2,
        "an interleaved pipeline (parallel.virtual_pipeline=2)",
        "set train.global_batch_size=48",
    ),
    (["model.kv_group_size=2"], 1, "layer groups are not implemented yet", "set model.kv_group_size=1"),
    (["model.qk_rope_head_dim=31"], 1, "model.qk_rope_head_dim", "set model.qk_rope_head_dim=32"),
    (["model.gate=none"], 1, "model.kv_emb_dim", "set model.kv_emb_dim=0"),
    (["model.kv_emb_dim=0"], 1, "model.kv_emb_dim", "or model.gate=none"),
    ([*_MHA, "model.gate=mul"], 1, "model.gate", "set model.gate=none"),
    ([*_MHA, "model.kv_emb_dim=8"], 1, "model.kv_emb_dim", "set model.kv_emb_dim=0"),
    ([*_MHA, "model.q_lora_rank=8"], 1, "model.q_lora_rank", "set model.q_lora_rank=0"),
    ([*_MHA, "model.num_attention_heads=13"], 1, "model.hidden_size = 768", "set model.num_attention_heads=12"),
    ([*_MHA, "model.v_head_dim=32"], 1, "model.v_head_dim", "set model.v_head_dim=64"),
]


@pytest.mark.parametrize(("overrides", "world_size", "what", "fix"), _REFUSED)
def test_refused(overrides: list[str], world_size: int, what: str, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        _check(overrides, world_size)
    message = str(caught.value)
    assert what in message
    assert fix in message
    assert re.search(r": got .+; allowed: .+; fix: .+", message)
    assert "\n" not in message


@pytest.mark.parametrize(("overrides", "world_size", "what", "fix"), _REFUSED)
def test_the_proposed_fix_removes_the_complaint(overrides: list[str], world_size: int, what: str, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        _check(overrides, world_size)
    proposal = re.search(r"fix: set ([a-z0-9_.]+=[a-z0-9]+)", str(caught.value))
    if proposal is None:
        assert "start" in str(caught.value) or "model.gate=none" in str(caught.value)
        return
    try:
        _check([*overrides, proposal[1]], world_size)
    except UserError as other:  # another rule may still object, the one that was mended may not
        assert what not in str(other)


@pytest.mark.parametrize("name", ["num_layers", "hidden_size", "num_attention_heads", "intermediate_size"])
def test_sizes_are_positive(name: str) -> None:
    with pytest.raises(UserError, match=f"model.{name}: got 0; allowed: at least 1"):
        _check([f"model.{name}=0"])


@pytest.mark.parametrize("name", ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "vocab_size"])
def test_mla_sizes_are_positive(name: str) -> None:
    with pytest.raises(UserError, match=f"model.{name}: got -1; allowed: at least 1"):
        _check([f"model.{name}=-1"])


@pytest.mark.parametrize("name", ["q_lora_rank", "kv_emb_dim"])
def test_optional_sizes_are_not_negative(name: str) -> None:
    with pytest.raises(UserError, match=f"model.{name}: got -1; allowed: 0"):
        _check([f"model.{name}=-1"])


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("parallel.tensor=0", "at least 1"),
        ("parallel.gate_group=0", "at least 1"),
        ("train.micro_batch_size=0", "at least 1"),
        ("train.steps=-1", "0 or more"),
        ("optimizer.weight_decay=-0.1", "0 or more"),
        ("optimizer.lr=0", "more than 0"),
        ("train.peer_timeout_s=-1", "0 or more"),
        ("optimizer.beta2=1", "0 to below 1"),
        ("model.attention_dropout=1", "0 to below 1"),
        ("optimizer.min_lr_ratio=1.1", "0 to 1"),
        ("data.eod_id=-2", "a token id"),
        ("run.seed=4294967296", "at most 4294967295"),
        ("run.seed=-1", "0 or more"),
        ("train.steps=2147483648", "at most 2147483647"),
        ("train.steps=1e30", "at most 2147483647"),
        ("optimizer.warmup_steps=2147483648", "at most 2147483647"),
        ("train.tokens=1e19", "at most 9223372036854775807"),
        ("model.num_layers=1e12", "at most 10000"),
        ("model.vocab_size=1e12", "at most 2147483647"),
        ("data.num_workers=1e12", "at most 1024"),
        ("train.collective_timeout_s=0.5", "at least 1"),
        ("optimizer.lr=1e38", "at most 1000"),
        ("model.rope_theta=1e38", "at most 1000000000000"),
        ("train.peer_timeout_s=1e300", "at most 31536000"),
        ("train.collective_timeout_s=1e300", "at most 31536000"),
    ],
)
def test_ranges(override: str, allowed: str) -> None:
    name = override.partition("=")[0]
    with pytest.raises(UserError) as caught:
        _check([override])
    assert str(caught.value).startswith(f"{name}: got ")
    assert allowed in str(caught.value)


def test_too_many_steps_may_come_from_the_token_budget() -> None:
    tokens = ["train.tokens=9e18", "train.seq_length=1", "train.global_batch_size=8"]
    with pytest.raises(UserError, match=r"train\.tokens gives more optimizer steps .*at most 2147483647"):
        _check(tokens)


def test_the_largest_seed_is_the_one_that_shuffles() -> None:
    import numpy as np

    assert _check(["run.seed=4294967295"]).world_size == 1
    np.random.RandomState(4294967295)
    with pytest.raises(ValueError, match="between 0 and"):
        np.random.RandomState(4294967296)


def test_every_run_configuration_fits_one_host(root: Path) -> None:
    for path in sorted((root / "configs" / "run").glob("*.yaml")):
        world_size = 2 if path.stem == "quickstart" else 8
        assert check_config(load_config(path), world_size).dp == world_size


def test_quickstart_runs_on_one_rank_too() -> None:
    assert _check(["parallel.gate_group=1"], 1, "quickstart").num_microbatches == 4


def test_nearest_values() -> None:
    assert nearest(5, [1, 2, 3, 4, 6]) == 6
    assert nearest_multiple(100, 32) == 96
    assert nearest_multiple(1, 32) == 32
    assert nearest_multiple(48, 32) == 64


def test_checking_imports_no_torch(root: Path) -> None:
    code = "import sys, egmla_megatron.config.check, egmla_megatron.config.load, egmla_megatron.model.count; "
    code += "sys.exit(any(name in sys.modules for name in ('torch', 'megatron')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
