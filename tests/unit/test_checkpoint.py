"""Saving and loading on one rank: exact, and with other hyper-parameters where a user may change them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from torch import Tensor

from egmla_megatron.checkpoint.load import _read, load_checkpoint, read_full_weights
from egmla_megatron.checkpoint.manifest import read_manifest
from egmla_megatron.checkpoint.save import Saver
from egmla_megatron.checkpoint.state import model_state
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.config.to_mcore import ddp_config
from egmla_megatron.convert.command import Export, convert_to_hf
from egmla_megatron.convert.from_hf import import_hf
from egmla_megatron.errors import UserError
from egmla_megatron.model.build import build_model
from egmla_megatron.model.names import global_names
from egmla_megatron.train.optimizer import build_optimizer, build_schedule, wrap_ddp
from egmla_megatron.train.resume import check_same_order
from egmla_megatron.train.step import train_step
from tests.tiny import random_batches, tiny_model, tiny_run


class Run:
    """A tiny run; `take(n)` takes n steps, always on the same batches for the same step numbers."""

    def __init__(self, world: Any, cfg: RunConfig) -> None:
        self.world, self.cfg, self.done = world, cfg, 0
        self.built = build_model(cfg, world)
        self.model = wrap_ddp(cfg, self.built, world)
        self.optimizer = build_optimizer(cfg, self.model, self.built)
        self.schedule = build_schedule(cfg, self.optimizer, 0)

    def take(self, steps: int) -> None:
        for _ in range(steps):
            batches = iter(random_batches(self.cfg, seed=self.done))
            assert train_step(self.cfg, self.world, self.model, self.optimizer, batches).applied
            self.schedule.step(1)
            self.done += 1

    def save(self) -> Path:
        paths: list[Path] = []
        saver = Saver(
            self.cfg,
            self.world,
            self.built,
            self.model,
            self.optimizer,
            "data",
            lambda step, path, _: paths.append(path),
        )
        saver.save(self.done)
        return paths[0]

    def load(self, path: Path) -> None:
        self.done = load_checkpoint(self.cfg, self.world, self.built, self.optimizer, path, "data").step
        self.schedule = build_schedule(self.cfg, self.optimizer, self.done)

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in global_names(self.built.module)}


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"optimizer": {"distributed": False, "lr": 1e-2, "gate_table_lr_ratio": 3.0}},
    "distributed": {"optimizer": {"distributed": True, "lr": 1e-2, "gate_table_lr_ratio": 3.0}},
    "distributed_bf16": {"optimizer": {"distributed": True, "lr": 1e-2}, "train": {"precision": "bf16"}},
    "plain_bf16": {"optimizer": {"distributed": False, "lr": 1e-2}, "train": {"precision": "bf16"}},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_exact_resume(world: Any, tmp_path: Path, name: str) -> None:
    """The optimizer state comes back whole: three steps after two are those of five in a row."""
    model = tiny_model(hidden_dropout=0.1)
    cfg = tiny_run(model, str(tmp_path), **VARIANTS[name])
    first = Run(world, cfg)
    first.take(2)
    path = first.save()
    first.take(3)
    again = Run(world, cfg)
    again.take(1)  # states that loading must replace
    again.load(path)
    again.take(3)
    expected = first.weights()
    assert [key for key, tensor in again.weights().items() if not torch.equal(tensor, expected[key])] == []


def test_exact_resume_with_several_gradient_buckets(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """megatron-core 0.19.2 alone saves everything from the second bucket on from a wrong place."""
    from egmla_megatron.train import optimizer

    def small_buckets(cfg: RunConfig, **settings: Any) -> Any:
        return replace(ddp_config(cfg, **settings), bucket_size=700)

    monkeypatch.setattr(optimizer, "ddp_config", small_buckets)
    overlap = {"implementation": "torch", "overlap_grad_reduce": True}
    cfg = tiny_run(folder=str(tmp_path), optimizer={"distributed": True, "lr": 1e-2}, parallel=overlap)
    first = Run(world, cfg)
    assert len(first.model[0].buffers[0].buckets) > 3
    first.take(2)
    path = first.save()
    first.take(3)
    again = Run(world, cfg)
    again.load(path)
    again.take(3)
    expected = first.weights()
    assert [key for key, tensor in again.weights().items() if not torch.equal(tensor, expected[key])] == []


@pytest.mark.parametrize("distributed", [False, True])
def test_other_hyperparameters_after_a_resume(world: Any, tmp_path: Path, distributed: bool) -> None:
    before = Run(world, tiny_run(folder=str(tmp_path), optimizer={"distributed": distributed, "lr": 1e-2}))
    before.take(2)
    path = before.save()
    changed = {
        "lr": 3e-3,
        "min_lr_ratio": 0.5,
        "beta2": 0.9,
        "eps": 1e-5,
        "weight_decay": 0.0,
        "gate_table_lr_ratio": 4.0,
    }
    after = Run(
        world, tiny_run(folder=str(tmp_path), optimizer={"distributed": distributed, "warmup_steps": 0, **changed})
    )
    after.load(path)
    groups = after.optimizer.param_groups
    assert {group["max_lr"] for group in groups} == {3e-3, 4.0 * 3e-3}
    assert all(group["betas"] == (0.9, 0.9) and group["eps"] == 1e-5 for group in groups)
    assert all(group["weight_decay"] == 0.0 for group in groups)
    assert steps_counted(after) == steps_counted(before) == {2.0}
    after.take(1)


def steps_counted(run: Run) -> set[float]:
    """What AdamW believes about the number of steps, which decides its bias correction."""
    inner = [each.optimizer for each in getattr(run.optimizer, "chained_optimizers", [run.optimizer])]
    return {float(state["step"]) for each in inner for state in each.state.values()}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_alone_start_a_fresh_optimizer(world: Any, tmp_path: Path, precision: str) -> None:
    """By way of Hugging Face; batch, data and optimizer are the new run's own."""
    train = {"precision": precision}
    trained = Run(world, tiny_run(folder=str(tmp_path), optimizer={"distributed": False}, train=train))
    trained.take(2)
    folder = tmp_path / "hf"
    convert_to_hf(trained.save(), folder, Export())
    path = import_hf(folder, tmp_path / "weights", step=5)
    train |= {"global_batch_size": 2, "seq_length": 8}
    cfg = tiny_run(folder=str(tmp_path / "new"), optimizer={"distributed": True}, train=train)
    check_same_order(replace(cfg, run=replace(cfg.run, seed=99)), path, read_manifest(path))
    fresh = Run(world, cfg)
    fresh.load(path)
    assert fresh.done == 5
    expected = trained.weights()
    assert [key for key, tensor in fresh.weights().items() if not torch.equal(tensor, expected[key])] == []
    fresh.take(1)  # from fp32 copies that are those weights: a step of AdamW moves none by more than about lr
    lr = max(group["lr"] for group in fresh.optimizer.param_groups)
    moved = {key: (tensor - expected[key]).abs().max().item() for key, tensor in fresh.weights().items()}
    assert 0 < max(moved.values()) < 4 * lr + 0.01 * (precision == "bf16")
    with pytest.raises(UserError, match=r"another architecture .*kv_lora_rank"):
        load_checkpoint(tiny_run(tiny_model(kv_lora_rank=9)), world, fresh.built, fresh.optimizer, path, "")


def test_whole_weights_of_a_checkpoint(world: Any, tmp_path: Path) -> None:
    run = Run(world, tiny_run(folder=str(tmp_path), optimizer={"distributed": True}))
    run.take(1)
    run.save()
    weights, model, manifest = read_full_weights(tmp_path)
    expected = run.weights()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert model == run.cfg.model and manifest.step == 1 and manifest.consumed_samples == 4


def test_other_data_are_refused(world: Any, tmp_path: Path) -> None:
    run = Run(world, tiny_run(folder=str(tmp_path)))
    run.take(1)
    path = run.save()
    with pytest.raises(UserError, match=r"other data or in another order \(fingerprint data, now other\)"):
        load_checkpoint(run.cfg, world, run.built, run.optimizer, path, "other")


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:10])


def lose(path: Path) -> None:
    path.unlink()


def scramble(path: Path) -> None:
    path.write_bytes(b"no checkpoint " * (path.stat().st_size // 14 + 1))


@pytest.mark.parametrize(
    ("pattern", "damage"),
    [
        *itertools.product(("*.distcp", ".metadata"), (cut_short, lose, scramble)),
        ("metadata.json", lose),
    ],
)
def test_an_unreadable_checkpoint_gives_one_line(
    world: Any, tmp_path: Path, pattern: str, damage: Callable[[Path], None]
) -> None:
    """Damage behind the manifest's back: sizes are checked before, so only a bad disk brings us here."""
    run = Run(world, tiny_run(folder=str(tmp_path)))
    run.take(1)
    path = run.save()
    state = {"model": model_state(run.built, world)}
    assert _read(state, path)["model"].keys()
    files = list(path.glob(pattern))
    assert files
    for file in files:
        damage(file)
    with pytest.raises(
        UserError, match=r"cannot be read .*; rename it to go on from the checkpoint before it"
    ) as caught:
        _read({"model": model_state(run.built, world)}, path)
    message = str(caught.value)
    assert message.startswith(f"checkpoint: {path} cannot be read (")
    assert "\n" not in message and len(message) < 800


def test_a_disk_that_is_too_small_is_noticed_before_writing(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from egmla_megatron.checkpoint import save

    run = Run(world, tiny_run(folder=str(tmp_path)))
    kept = run.save()
    usage = save.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(save.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    run.take(1)
    with pytest.raises(UserError, match=r"No space left on device.*step_00000000 is intact"):
        run.save()
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]


# keys of a checkpoint that Transformer Engine's layers wrote on a GPU; only the optimizer's prefix is left out
WRITTEN_BY_TE = {
    "decoder.final_layernorm.weight",
    "decoder.layers.input_layernorm.weight",
    "decoder.layers.mlp.linear_fc1.layer_norm_weight",
    "decoder.layers.mlp.linear_fc1.weight",
    "decoder.layers.mlp.linear_fc2.weight",
    "decoder.layers.self_attention.kv_layernorm.weight",
    "decoder.layers.self_attention.linear_kv_down_proj.weight",
    "decoder.layers.self_attention.linear_kv_up_proj.gate_norm_bias",
    "decoder.layers.self_attention.linear_kv_up_proj.gate_norm_weight",
    "decoder.layers.self_attention.linear_kv_up_proj.gate_proj_weight",
    "decoder.layers.self_attention.linear_kv_up_proj.up.weight",
    "decoder.layers.self_attention.linear_proj.weight",
    "decoder.layers.self_attention.linear_q_proj.weight",
    "embedding.word_embeddings.weight",
    "gate_table.weight",
}


def test_torch_layers_name_their_tensors_as_transformer_engine_does(world: Any, tmp_path: Path) -> None:
    """A run trained with Transformer Engine must go on, and convert, on a machine without it."""
    built = build_model(tiny_run(tiny_model(), str(tmp_path)), world)
    assert {tensor.key for tensor in nested_values(model_state(built, world))} == WRITTEN_BY_TE
