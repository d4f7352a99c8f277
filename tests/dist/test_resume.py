"""A run that was killed and started again ends exactly where the run that was never stopped ends."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.dist.harness import Job, events, start_trainer, trained
from tests.tiny import tiny_model, write_run

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(500)]
STEPS = 12
SAVED = 3  # steps between checkpoints
KILLED_AT = f"step {5:>7}/{STEPS}"
SECTIONS: dict[str, Any] = {
    "train": {"steps": STEPS, "eval_interval": 4, "eval_batches": 2},
    "checkpoint": {"interval_steps": SAVED, "keep": 0},
    "parallel": {"implementation": "torch", "gate_group": 2},
}


def validated(run: Path) -> dict[int, float]:
    return {event["step"]: event["val_loss"] for event in events(run, "eval")}


def weights(run: Path) -> dict[str, Any]:
    from egmla_megatron.checkpoint.load import read_full_weights

    return read_full_weights(run)[0]


def kill_in_the_middle(job: Job) -> None:
    job.wait_for(KILLED_AT)
    job.kill()


def assert_same_run(run: Path, reference: Path) -> None:
    """Bit for bit: losses, norms and learning rates of all steps, evaluations, final weights."""
    import torch

    assert sorted(trained(reference)) == list(range(1, STEPS + 1))
    assert trained(run) == trained(reference)
    assert validated(run) == validated(reference) and len(validated(run)) == 3
    got, expected = weights(run), weights(reference)
    assert got.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(got[name], expected[name])] == []


def test_killed_run_with_distributed_optimizer_and_dropout(tmp_path: Path) -> None:
    model = tiny_model(hidden_dropout=0.1, attention_dropout=0.1)
    overlap = {"implementation": "torch", "gate_group": 2, "overlap_grad_reduce": True, "overlap_param_gather": True}
    sections = {
        **SECTIONS,
        "optimizer": {"distributed": True, "lr": 1e-2, "warmup_steps": 2},
        "parallel": overlap,  # a checkpoint must hold the weights that are still to be gathered
    }
    config, reference = write_run(tmp_path, "whole", model, **sections)
    whole = start_trainer(2, tmp_path / "whole.log", config)
    config, run = write_run(tmp_path, "killed", model, **sections)
    kill_in_the_middle(start_trainer(2, tmp_path / "first.log", config))
    whole.succeed()
    assert len(trained(run)) < STEPS
    start_trainer(2, tmp_path / "second.log", config).succeed()
    starts = events(run, "start")
    assert [start["step"] for start in starts] in ([0, SAVED], [0, 2 * SAVED])
    assert starts[1]["resumed_from"].endswith(f"step_{starts[1]['step']:08d}")
    assert_same_run(run, reference)


DEEP = tiny_model(num_layers=4)  # enough for two chunks on each of two stages


def sections_with(distributed: bool, **parallel: Any) -> dict[str, Any]:
    """Without dropout, which no other layout repeats; a large eps keeps Adam from making steps of rounding."""
    optimizer = {"distributed": distributed, "lr": 1e-2, "warmup_steps": 2, "eps": 1e-3}
    return {**SECTIONS, "optimizer": optimizer, "parallel": {"implementation": "torch", **parallel}}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run on two ranks that share the gating tables, with the plain optimizer."""
    folder = tmp_path_factory.mktemp("reference")
    config, run = write_run(folder, "whole", DEEP, **sections_with(False, gate_group=2))
    start_trainer(2, folder / "log", config).succeed()
    assert sorted(trained(run)) == list(range(1, STEPS + 1))
    return run


def assert_close_run(run: Path, reference: Path) -> None:
    """Another layout rounds differently, and that is all."""
    expected, final = trained(reference), weights(reference)
    assert max(trained(run)) == STEPS
    for step, (loss, norm, lr) in trained(run).items():
        assert (loss, lr) == pytest.approx(expected[step][::2], rel=1e-6), f"step {step}"
        assert norm == pytest.approx(expected[step][1], rel=1e-5), f"step {step}"  # up to 3e-6, where the loss is exact
    got = weights(run)
    assert got.keys() == final.keys()
    assert max((got[name] - final[name]).abs().max().item() for name in final) < 1e-6


def test_plain_optimizer_on_the_same_and_on_another_number_of_ranks(tmp_path: Path, reference: Path) -> None:
    config, same = write_run(tmp_path, "same", DEEP, **sections_with(False, gate_group=2))
    copy_checkpoint(reference, same)
    job = start_trainer(2, tmp_path / "same.log", config)
    config, alone = write_run(tmp_path, "alone", DEEP, **sections_with(False))
    copy_checkpoint(reference, alone)
    start_trainer(1, tmp_path / "alone.log", config).succeed()
    job.succeed()
    assert [start["step"] for start in events(same, "start") + events(alone, "start")] == [2 * SAVED, 2 * SAVED]
    expected, final = trained(reference), weights(reference)
    assert trained(same) == {step: expected[step] for step in range(2 * SAVED + 1, STEPS + 1)}
    assert all(weights(same)[name].equal(tensor) for name, tensor in final.items())
    assert_close_run(alone, reference)


def test_every_kind_of_parallelism_goes_on_with_the_others_run(tmp_path: Path, reference: Path) -> None:
    """One run with the distributed optimizer, under another layout after each start."""
    layouts: list[dict[str, Any]] = [
        {"pipeline": 2},
        {"context": 2, "gate_group": 2},
        {"pipeline": 2, "virtual_pipeline": 2, "overlap_grad_reduce": True, "overlap_param_gather": True},
        {"tensor": 2, "sequence": True, "gate_group": 2},
    ]
    for number, layout in enumerate(layouts):
        config, run = write_run(tmp_path, "run", DEEP, **sections_with(True, **layout))
        start_trainer(2, tmp_path / f"{number}.log", config, f"train.exit_after_steps={SAVED}").succeed()
    assert [start["step"] for start in events(run, "start")] == [0, SAVED, 2 * SAVED, 3 * SAVED]
    assert_close_run(run, reference)
    assert validated(run) == pytest.approx(validated(reference), rel=1e-6)


def copy_checkpoint(reference: Path, run: Path) -> None:
    """Start `run` from the reference's checkpoint in the middle, as if it had been stopped there."""
    name = f"checkpoints/step_{2 * SAVED:08d}"
    shutil.copytree(reference / name, run / name)
    shutil.copy(reference / "config.yaml", run / "config.yaml")
