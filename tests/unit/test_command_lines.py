"""What a command line that lacks something is told, and what help says of settings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def _run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=root, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (["tools/bench_train.py"], "config"),
        (["tools/bench_kernels.py"], "config"),
        (["tools/evaluate.py", "ppl"], "checkpoint, --data"),
        (["tools/plan.py"], ""),
    ],
)
def test_settings_are_never_asked_for(root: Path, arguments: list[str], missing: str) -> None:
    done = _run(root, *arguments)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "section.key" not in done.stderr
    if missing:
        assert f"the following arguments are required: {missing}; see --help" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["tools/bench_train.py"],
        ["tools/bench_kernels.py"],
        ["tools/bench_sharding.py"],
        ["tools/plan.py"],
        ["tools/evaluate.py", "ppl"],
        ["-m", "egmla_megatron.quickstart"],
        ["-m", "egmla_megatron.train"],
    ],
)
def test_help_writes_settings_as_optional(root: Path, arguments: list[str]) -> None:
    done = _run(root, *arguments, "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: ")
    assert "[section.key=value ...]" in done.stdout.partition("\n\n")[0]
