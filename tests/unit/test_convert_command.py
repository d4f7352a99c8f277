"""The conversion command: what --verify prints and returns, links, layouts and what the two directions print."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from egmla_megatron.convert import command
from egmla_megatron.convert.from_hf import import_hf
from egmla_megatron.convert.open_export import open_export
from egmla_megatron.convert.to_hf import export_hf
from egmla_megatron.convert.verify import Comparison, compare
from tests.hf_models import BASE, one_thread
from tests.unit.test_commands import call
from tests.unit.test_from_hf import weights_of

__all__ = ["one_thread"]  # a fixture, used by every test of the file


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("c")
    model = replace(BASE, hidden_size=12, max_position_embeddings=32)
    export_hf(weights_of(model), model, folder / "hf")
    return import_hf(folder / "hf", folder / "checkpoint")


def test_verify_holds_the_export_against_megatron_core(checkpoint: Path, root: Path, tmp_path: Path) -> None:
    target = tmp_path / "a b"
    options = ["--verify", "--dtype", "bf16", "--vocab-size", "50", "--max-shard-size", "5KB"]
    program = str(root / "tools" / "convert_checkpoint.py")
    result = subprocess.run(
        [sys.executable, program, "to-hf", str(checkpoint), str(target), *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    wrote, equal, rounding = result.stdout.splitlines()
    assert wrote == f"wrote {target} (checkpoint, bfloat16)"
    assert equal.startswith("verify: max_abs ") and equal.endswith("greedy_agreement 1")
    assert rounding.startswith("verify, against the weights before rounding to bfloat16: max_abs ")
    assert float(equal.split()[2].rstrip(",")) < 1e-4 < float(rounding.split(" max_abs ")[1].split(",")[0])
    weights, _, model = open_export(target)
    assert (model.vocab_size, weights.dtype) == (50, torch.bfloat16)


def test_a_difference_is_exit_code_1(
    checkpoint: Path,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "verify_export", lambda *arguments: Comparison(0.5, 0.1, 0.9, 10.0))
    arguments = ["to-hf", str(checkpoint), str(tmp_path / "hf"), "--verify"]
    code, _, err = call(str(root / "tools" / "convert_checkpoint.py"), arguments, monkeypatch, capsys)
    assert code == 1
    assert err == f"error: {tmp_path}/hf does not compute what the checkpoint does; do not use it\n"


def test_what_counts_as_equal() -> None:
    logits = torch.randn(2, 5, 7)
    same = compare(logits, torch.cat((logits, logits), dim=-1))  # a padded vocabulary on the other side
    assert same.equal and (same.max_abs, same.greedy_agreement) == (0.0, 1.0)
    assert not compare(logits + 0.1, logits).equal
    assert not compare(logits * float("nan"), logits).equal


def test_a_link_stays_a_link(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for _ in range(2):
        command.convert_to_hf(checkpoint, tmp_path / "link", command.Export())
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]
