"""The planning tool as its users call it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from egmla_megatron.report.plan import format_plan, make_plan


def _plan(root: Path, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "tools" / "plan.py"), *arguments]
    return subprocess.run(command, cwd=cwd or root, capture_output=True, text=True, check=False, timeout=60)


def test_json(root: Path, tmp_path: Path) -> None:
    done = _plan(root, "pretrain_1b2", "model.num_layers=12", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["active_params"] + plan["gate_table_params"] == plan["total_params"]
    assert plan["kv_cache_elements_per_token"] == 12 * (128 + 64)
    assert plan["training_memory_bytes"]["total"] == 18 * plan["total_params"]
    assert "layout" not in plan


def test_table_names_the_contract_keys(root: Path) -> None:
    done = _plan(root, "configs/model/eg_mla_base_kv64.yaml")
    assert done.returncode == 0, done.stderr
    for key in ("active_params", "gate_table_params", "total_params", "kv_cache_elements_per_token"):
        assert key in done.stdout
    assert "120.1 M" in done.stdout


def test_layout() -> None:
    plan = make_plan("pretrain_base", ["parallel.gate_group=4"], world_size=8)
    assert plan["layout"]["gate_data_parallel"] == 2
    assert "gate_data_parallel" in format_plan(plan)


def test_a_mistake_is_one_line_and_exit_code_2(root: Path) -> None:
    mistakes = (
        ("quickstart", "model.kv_emb_dims=3"),
        ("quickstart", "model.kv_emb_dim=0"),
        ("quickstart", "--world-size", "3"),
        ("gone.yaml",),
    )
    for arguments in mistakes:
        done = _plan(root, *arguments)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1


def _ends(root: Path, body: str) -> subprocess.CompletedProcess[str]:
    code = (
        f"from egmla_megatron.cli import run_main\nfrom egmla_megatron.errors import UserError\n{body}\nrun_main(main)"
    )
    return subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)


def test_how_mains_end(root: Path) -> None:
    done = _ends(root, "def main(): raise UserError('two\\n  lines')")
    assert (done.returncode, done.stderr) == (2, "error: two lines\n")
    assert _ends(root, "def main(): raise KeyboardInterrupt").returncode == 130
    assert _ends(root, "def main(): return 3").returncode == 3
    assert _ends(root, "def main(): pass").returncode == 0
    bug = _ends(root, "def main(): raise ValueError('bug')")
    assert bug.returncode == 1
    assert "Traceback" in bug.stderr


def test_a_reader_that_goes_away_is_no_error(root: Path) -> None:
    body = "import signal\ndef main():\n    for _ in range(100000): print('x' * 100)"
    code = f"from egmla_megatron.cli import run_main\n{body}\nrun_main(main)"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=30) == 0
