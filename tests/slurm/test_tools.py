"""The scripts around pretraining, submitted with sbatch: a row of the ablation, its perplexity, the benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dist.harness import events
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import submit, tiny_settings

pytestmark = [pytest.mark.slurm, pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(400)]

BENCH = ["--config=bench_nodes", "--variants=vanilla,dimension_wise_all_to_all", "--sequences=1", "--steps=2",
         "--warmup=1", "--json=b.json", "model.num_layers=1", "model.vocab_size=512", "model.hidden_size=48",
         "model.intermediate_size=64"]  # fmt: skip


def test_ablation_perplexity_and_benchmark(cluster: Cluster, tmp_path: Path) -> None:
    """The model of one node scored by two; relative paths start from the folder of sbatch, one with a space."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    site = folder / "site.sh"
    site.write_text("SITE_PREFLIGHT=off\n")
    evaluated = {"steps": 2, "eval_interval": 2, "eval_batches": 50, "global_batch_size": 4}
    arguments, run = tiny_settings(folder, "run", train=evaluated, checkpoint={"interval_steps": 2})
    bench = submit(cluster, folder, run, BENCH, script="bench_sharding",
                   options=["--nodes=2", "--nodelist=node3,node4"], EGMLA_SITE=str(site))  # fmt: skip
    row = submit(cluster, folder, run, ["eg_mla_base_kv64", *arguments], script="ablation",
                 options=["--nodes=1", "--nodelist=node1"], EGMLA_SITE=str(site))  # fmt: skip
    assert row.wait_for_end() == "COMPLETED", row.output
    (trained,) = events(run, "eval")
    words = ["ppl", "run", "--data", "data/valid", "--json", "ppl.json", "parallel.gate_group=2"]
    scored = submit(cluster, folder, run, [*words, "train.micro_batch_size=1"], script="evaluate",
                    options=["--nodes=2", "--nodelist=node1,node2"], EGMLA_SITE=str(site))  # fmt: skip
    assert scored.wait_for_end() == "COMPLETED", scored.output
    found = json.loads((folder / "ppl.json").read_text())
    assert (found["step"], found["layout"]["world_size"], found["layout"]["gate_group"]) == (2, 2, 2)
    (score,) = found["scores"]
    assert score["tokens"] == trained["tokens"]
    assert score["val_loss"] == pytest.approx(trained["val_loss"], rel=1e-5)
    assert f"| data/valid | {score['val_loss']:.5f} |" in scored.output
    assert bench.wait_for_end() == "COMPLETED", bench.output
    rows = json.loads((folder / "b.json").read_text())["rows"]
    assert [each["variant"] for each in rows] == ["vanilla", "dimension_wise_all_to_all"]
    assert all(each["gate_world"] == 2 and each["loss_last"] == pytest.approx(rows[0]["loss_last"]) for each in rows)
    assert "| vanilla" in bench.output and "Traceback" not in bench.output + scored.output + row.output
