"""Every redirect of torch.cuda is needed, and none is made where CUDA exists."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from egmla_megatron.parallel import cpu
from tests.dist.harness import environment


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Redirect left out ("": none) -> error of a short run without it."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("redirects are for machines without CUDA, and this one has it")
    folder = tmp_path_factory.mktemp("probe")
    found, log = folder / "found.json", folder / "log"
    with open(log, "wb") as output:
        probe = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__).with_name("cpu_probe.py")), str(found)],
            env=environment(),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        code = probe.wait(timeout=240)
    finally:  # the forks end without clean-up and leave their checkpoint writers behind
        with contextlib.suppress(ProcessLookupError):
            os.killpg(probe.pid, signal.SIGKILL)
    assert code == 0, log.read_text(errors="replace")[-3000:]
    return json.loads(found.read_text())


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
