"""Kernels timed alone on a GPU: every row in a CUDA graph, under Transformer Engine and under torch."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.dist.harness import start
from tests.gpu.small_model import SMALL
from tests.tiny import write_run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

GEMMS = ("forward", "input gradient", "weight gradient")
PASSES = ("forward", "backward")
LINEARS = ("kv down-projection", "kv up-projection", "output projection", "MLP gate and up", "MLP down", "LM head")
OTHERS = (
    "attention",
    "RMSNorm of hidden",
    "RMSNorm of the latent, our kernel",
    "SwiGLU",
    "cross-entropy",
)
HEADS = tuple(f"heads with RoPE, {how}" for how in ("our kernel", "by single operations"))
GATE = tuple(f"gate and LayerNorm, {how}" for how in ("our kernel", "by single operations"))
GATE += ("gate, LayerNorm and heads with RoPE, our kernels",)
PLAIN_GATE = tuple(f"gate, {how}" for how in ("our kernel", "by single operations"))
PLAIN_GATE += ("gate and heads with RoPE, our kernels",)


def expected_rows(
    linears: tuple[str, ...], others: tuple[str, ...], updates: tuple[str, ...], *, sums: tuple[str, ...] = PASSES
) -> set[tuple[str, str]]:
    """`sums`: passes in which gradients or the residual are added by themselves."""
    found = {(name, each) for name in (*LINEARS, *linears) for each in GEMMS}
    found |= {("residual sum", each) for each in sums}
    found |= {(name, each) for name in (*OTHERS, *HEADS, *others) for each in PASSES}
    return found | {(name, "update") for name in updates}


TE_UPDATES = ("AdamW, our kernel", "AdamW of table rows, our kernels")
TORCH_UPDATES = ("AdamW, torch, fused",)
# name -> (model, settings, rows)
RUNS = {
    "te": (SMALL, {}, expected_rows(("q projection", "gate projection"), GATE, TE_UPDATES, sums=("forward",))),
    "te_q_lora_no_norm": (
        replace(SMALL, q_lora_rank=96, gate="add", gate_norm=False),
        {"fused_grad_accumulation": False},
        expected_rows(
            ("q down-projection", "q up-projection", "gate projection"),
            ("RMSNorm of q's latent", *PLAIN_GATE),
            TE_UPDATES,
        ),
    ),
    "torch_mla": (
        replace(SMALL, gate="none", kv_emb_dim=0),
        {},
        expected_rows(("q projection",), (), TORCH_UPDATES),
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_all_kernels(tmp_path: Path, name: str) -> None:
    implementation = name.partition("_")[0]
    if implementation == "te" and importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("transformer_engine is not installed")
    model, parallel, expected = RUNS[name]
    config, _ = write_run(
        tmp_path,
        "run",
        model,
        train={
            "precision": "bf16",
            "seq_length": 256,
            "micro_batch_size": 4,
            "global_batch_size": 8,
            "steps": 1000,
        },
        parallel={"implementation": implementation, **parallel},
        optimizer={"distributed": implementation == "te", "lr": 1e-3},
    )
    out = tmp_path / "out.json"
    command = ["tools/bench_kernels.py", str(config), "--repeats=5", f"--json={out}"]
    job = start(1, command, tmp_path / "log")
    job.limit_s = 580
    output = job.succeed()
    result = json.loads(out.read_text())
    rows = result["rows"]
    assert {(row["kernel"], row["pass"]) for row in rows} == expected and len(rows) == len(expected)
    assert result["hardware"]["gpu"] and result["settings"]["implementation"] == implementation
    for row in rows:
        where = f"{row['kernel']}, {row['pass']}"
        assert row["n"] == 5 and 0 < row["us_p10"] <= row["us_median"] <= row["us_p90"], where
        for share in ("share_of_copy", "share_of_product", "share_of_bound"):
            assert 0 <= row[share] <= 1.2, (where, share, row[share])
        assert row["share_of_bound"] > 0, where
        assert row["calls_at_once"] > 1, where
        together = any("our kernels" in other["kernel"] for other in rows)  # gate and heads
        alone = row["kernel"] in ("gate and LayerNorm, our kernel", "gate, our kernel", "heads with RoPE, our kernel")
        assert row["counted"] != ("by single operations" in row["kernel"] or (together and alone)), where
    assert result["machine"]["copy_tb_per_s"] > 0.1 and result["machine"]["product_tflops_per_s"] > 10
    assert "Device time of calls that follow each other in a CUDA graph" in output
    assert "Sum per micro-batch: " in output
