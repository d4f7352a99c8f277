"""Every redirect of torch.cuda is needed, and none is made where CUDA exists."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from egmla_megatron.parallel import cpu
from tests.dist.harness import environment


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """Redirect left out ("": none) -> error of a short run without it."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("redirects are for machines without CUDA, and this one has it")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("cpu_probe.py"))],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_short_run_works_with_all_of_them(outcomes: dict[str, str]) -> None:
    assert outcomes[""] == ""


@pytest.mark.parametrize("name", cpu.REDIRECTS)
def test_each_is_needed(outcomes: dict[str, str], name: str) -> None:
    assert outcomes[name] != "", f"works without {name}: delete it from parallel/cpu.py"


def test_nothing_is_redirected_where_cuda_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu, "_installed", set())
    monkeypatch.setattr(cpu, "REDIRECTS", {"all": ("", lambda: pytest.fail("redirected"))})
    cpu.install()


def test_redirects_are_installed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    calls: list[str] = []
    monkeypatch.setattr(cpu, "_installed", set())
    monkeypatch.setattr(cpu, "REDIRECTS", {"a": ("", lambda: calls.append("a")), "b": ("", lambda: calls.append("b"))})
    cpu.install(without=frozenset({"b"}))
    cpu.install()
    cpu.install()
    assert calls == ["a", "b"]
