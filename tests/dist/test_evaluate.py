"""tools/evaluate.py against the validation loss that the training itself found, on other layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from egmla_megatron.errors import UserError
from egmla_megatron.evaluate.perplexity import plan_evaluation
from tests.dist.harness import events, start, start_trainer
from tests.tiny import write_run

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]


def test_perplexity_of_a_checkpoint_on_any_layout(root: Path, tmp_path: Path) -> None:
    config, run = write_run(tmp_path, "run", train={"steps": 3, "eval_interval": 3, "eval_batches": 50})
    start_trainer(1, tmp_path / "log", config).succeed()
    (trained,) = events(run, "eval")
    valid = str(tmp_path / "data" / "valid")
    tool = str(root / "tools" / "evaluate.py")

    def evaluated(name: str, ranks: int, *options: str) -> dict:
        out = tmp_path / f"{name}.json"
        command = [tool, "ppl", str(run), "--data", valid, "--json", str(out), *options]
        printed = start(ranks, command, tmp_path / f"{name}.log", warm=True).succeed()
        assert json.loads(out.read_text())["step"] == 3
        (score,) = json.loads(out.read_text())["scores"]
        assert f"{score['val_loss']:.5f}" in printed
        return score

    whole = evaluated("one", 1)
    assert whole["tokens"] == trained["tokens"]
    assert whole["val_loss"] == pytest.approx(trained["val_loss"], rel=1e-6)
    layout = ("parallel.tensor=2", "parallel.gate_group=2", "train.micro_batch_size=1")
    single = evaluated("tensor", 2, *layout)
    assert single["left_out_sequences"] == 0 <= single["sequences"] - whole["sequences"] <= 1
    some = evaluated("some", 2, "--sequences", "8", "parallel.gate_group=2", "train.micro_batch_size=2")
    assert some["sequences"] == 8
    missing = str(tmp_path / "data" / "other")
    for where, data, overrides, sequences, message in (
        (str(run), valid, [], -1, "--sequences: got -1"),
        (str(run), valid, ["model.num_layers=1"], 0, "got model.num_layers=1, allowed parallel."),
        (str(run), valid, ["parallel.tensor=3"], 0, "parallel.tensor"),
        (str(run), valid, ["parallel.attention_backend=cudnn"], 0, "runs on GPUs, and no CUDA device is visible"),
        (str(run), missing, [], 0, "other"),
        (str(tmp_path), valid, [], 0, "no complete checkpoint"),
    ):
        with pytest.raises(UserError, match=message):
            plan_evaluation(where, [data], overrides, sequences, 1)
