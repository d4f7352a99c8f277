"""Counts that no machine could do are refused by every tool, before anything is imported or read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HUGE = f"{10**30}"
# option of a tool -> the rest of its command line
OPTIONS = {
    ("tools/bench_train.py", "--steps"): ["quickstart"],
    ("tools/bench_train.py", "--warmup"): ["quickstart"],
    ("tools/bench_train.py", "--rounds"): ["quickstart"],
    ("tools/bench_kernels.py", "--repeats"): ["quickstart"],
    ("tools/bench_sharding.py", "--sequences"): [],
    ("tools/bench_sharding.py", "--steps"): [],
    ("tools/bench_sharding.py", "--warmup"): [],
    ("tools/bench_sharding.py", "--rounds"): [],
    ("tools/bench_sharding.py", "--seed"): [],
    ("tools/bench_sharding.py", "--nodes-on-this-machine"): [],
    ("tools/bench_preprocess.py", "-n"): ["--text=x", "--tokenizer=x", "--record=x"],
    ("tools/bench_preprocess.py", "--copies"): ["--text=x", "--tokenizer=x", "--record=x"],
    ("tools/preprocess_data.py", "--workers"): ["--input", "x", "--output-prefix", "{tmp}/x"],
    ("tools/preprocess_data.py", "--seed"): ["--input", "x", "--output-prefix", "{tmp}/x"],
    ("tools/preprocess_data.py", "--vocab-size"): ["--input", "x", "--output-prefix", "{tmp}/x"],
    ("tools/verify_data.py", "--vocab-size"): ["x"],
    ("tools/plan.py", "--gpus"): ["quickstart"],
    ("tools/plan.py", "--gpus-per-node"): ["quickstart", "--gpus=8", "--gpu=h100"],
    ("tools/plan.py", "--gpu-tflops"): ["quickstart", "--gpus=8", "--gpu=h100"],
    ("tools/evaluate.py", "--sequences"): ["ppl", "x", "--data", "x"],
    ("tools/generate.py", "--num-samples"): ["x", "--prompt=x"],
    ("tools/generate.py", "--batch-size"): ["x", "--prompt=x"],
    ("tools/convert_checkpoint.py", "--step"): ["from-hf", "{tmp}/a", "{tmp}/b"],
    ("tools/convert_checkpoint.py", "--vocab-size"): ["from-hf", "{tmp}/a", "{tmp}/b"],
}


@pytest.mark.parametrize(("tool", "option"), OPTIONS, ids=lambda text: text.removeprefix("tools/"))
def test_huge_counts_are_refused(root: Path, tmp_path: Path, tool: str, option: str) -> None:
    rest = [word.format(tmp=tmp_path) for word in OPTIONS[tool, option]]
    command = [sys.executable, tool, *rest, option, HUGE]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2 and done.stdout == "", done.stderr
    assert done.stderr.startswith(f"error: {option}: got 1") and done.stderr.count("\n") == 1, done.stderr
    assert "allowed" in done.stderr
