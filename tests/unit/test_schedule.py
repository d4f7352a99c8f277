"""Learning rate and weight decay of every step and every kind of weight."""

from __future__ import annotations

import math
from typing import Any

import pytest

from egmla_megatron.config.schema import RunConfig
from egmla_megatron.model.build import build_model
from egmla_megatron.model.names import global_names
from egmla_megatron.train.optimizer import build_optimizer, build_schedule, wrap_ddp
from tests.tiny import MHA, TINY, tiny_model, tiny_run

LR = 0.01


def prepared(world: Any, model: Any = TINY, **sections: Any) -> tuple[RunConfig, Any, dict[int, str]]:
    """(configuration, optimizer, name of each optimizer parameter by its id)."""
    cfg = tiny_run(model, **sections)
    built = build_model(cfg, world)
    optimizer = build_optimizer(cfg, wrap_ddp(cfg, built, world), built)
    return cfg, optimizer, {id(parameter): name for name, parameter in global_names(built.module)}


def groups_by_name(optimizer: Any, names: dict[int, str]) -> dict[str, dict[str, Any]]:
    """Parameter group of every weight."""
    return {names[id(parameter)]: group for group in optimizer.param_groups for parameter in group["params"]}


def lr_at(world: Any, steps: list[int], **optimizer: Any) -> list[float]:
    """Learning rate that step number i (from 1) applies, in a run of 20 steps started at that step."""
    values = []
    for step in steps:
        options = {"lr": LR, "min_lr_ratio": 0.1, "warmup_steps": 4, **optimizer}
        cfg, built, _ = prepared(world, train={"steps": 20}, optimizer=options)
        build_schedule(cfg, built, step - 1)
        values.append(next(group["lr"] for group in built.param_groups if group["wd_mult"] == 1.0))
    return values


def test_warmup_starts_at_once_and_cosine_ends_at_the_minimum(world: Any) -> None:
    first, second, peak, middle, last, beyond = lr_at(world, [1, 2, 4, 12, 20, 25], schedule="cosine")
    assert first == pytest.approx(LR / 4)
    assert second == pytest.approx(LR / 2)
    assert peak == pytest.approx(LR)
    assert middle == pytest.approx(LR * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 8 / 16))))
    assert last == beyond == pytest.approx(LR / 10)


def test_other_schedules(world: Any) -> None:
    assert lr_at(world, [4, 12, 20], schedule="linear") == pytest.approx([LR, LR * 0.55, LR / 10])
    assert lr_at(world, [1, 4, 20], schedule="constant") == pytest.approx([LR / 4, LR, LR])
    wsd = lr_at(world, [4, 10, 15, 20], schedule="wsd", decay_steps=10)
    assert wsd == pytest.approx([LR, LR, LR * 0.55, LR / 10])
    assert lr_at(world, [8, 20], schedule="cosine", decay_steps=8) == pytest.approx([LR / 10, LR / 10])
    assert lr_at(world, [1], warmup_steps=0)[0] == pytest.approx(LR, rel=0.02)


def test_a_resume_continues_the_schedule(world: Any) -> None:
    """Stepping from the beginning and starting in the middle give the same numbers, to the last bit."""
    cfg, optimizer, _ = prepared(world, train={"steps": 20}, optimizer={"lr": LR, "warmup_steps": 4})
    schedule = build_schedule(cfg, optimizer, 0)
    stepped = []
    for _ in range(20):
        stepped.append(optimizer.param_groups[0]["lr"])
        schedule.step(1)
    for step in range(20):
        build_schedule(cfg, optimizer, step)
        assert optimizer.param_groups[0]["lr"] == stepped[step]


@pytest.mark.parametrize("distributed", [False, True])
def test_weight_decay_spares_norms_biases_and_tables(world: Any, distributed: bool) -> None:
    model = tiny_model(q_lora_rank=10, tie_word_embeddings=False)
    options = {"weight_decay": 0.3, "distributed": distributed}
    cfg, optimizer, names = prepared(world, model, optimizer=options)
    build_schedule(cfg, optimizer, 0)
    if distributed:  # its groups hold shards: count elements instead
        assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.3}
        spared = sum(
            p.numel() for group in optimizer.param_groups if not group["weight_decay"] for p in group["params"]
        )
        assert spared == sum(p.numel() for p in world_parameters(world, model) if p.dim() != 2)
        return
    groups = groups_by_name(optimizer, names)
    assert groups.keys() == set(names.values())
    for name, group in groups.items():
        spared = "norm" in name or "bias" in name or name == "gate_table.weight"
        assert group["weight_decay"] == (0.0 if spared else 0.3), name


def world_parameters(world: Any, model: Any) -> list[Any]:
    """The weights of a model: matrices have two dimensions, norms and biases one, the tables three."""
    return list(build_model(tiny_run(model), world).module.parameters())


def test_weight_decay_of_the_mha_baseline(world: Any) -> None:
    cfg, optimizer, names = prepared(world, tiny_model(**MHA), optimizer={"weight_decay": 0.3})
    build_schedule(cfg, optimizer, 0)
    groups = groups_by_name(optimizer, names)
    assert {name for name, group in groups.items() if group["weight_decay"] == 0.0} == {
        name for name in names.values() if name.endswith("bias") or "norm" in name
    }


def test_tables_have_their_own_learning_rate(world: Any) -> None:
    options = {"lr": LR, "gate_table_lr_ratio": 5.0, "min_lr_ratio": 0.1, "warmup_steps": 4}
    cfg, optimizer, names = prepared(world, train={"steps": 20}, optimizer=options)
    groups = groups_by_name(optimizer, names)
    for step, factor in ((1, 0.25), (4, 1.0), (20, 0.1)):
        build_schedule(cfg, optimizer, step - 1)
        for name, group in groups.items():
            ratio = 5.0 if name == "gate_table.weight" else 1.0
            assert group["lr"] == pytest.approx(LR * factor * ratio), (name, step)
