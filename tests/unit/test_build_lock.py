"""A killed build of megatron-core's extension does not hold up every later start; one that runs is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from egmla_megatron.config.check import check_config
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.errors import UserError
from egmla_megatron.train import session
from egmla_megatron.train.build_lock import EXTENSION, clear_abandoned_build, extension_lock
from tests.tiny import tiny_run

BUILD = """
import sys, time
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("building", flush=True)
time.sleep(60)
"""


def run_with(recompute: str, **train: float) -> RunConfig:
    cfg = tiny_run()
    return replace(cfg, train=replace(cfg.train, recompute=recompute, **train))  # type: ignore[arg-type]


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where torch would lock, in a folder of this test."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    path = tmp_path / EXTENSION / "lock"
    path.parent.mkdir()
    return path


def abandon(lock: Path, age_s: float) -> None:
    baton = FileBaton(str(lock))
    assert baton.try_acquire() and baton.fd is not None
    os.close(baton.fd)
    os.utime(lock, (time.time() - age_s,) * 2)


@pytest.mark.parametrize("moved", [False, True])
def test_the_lock_is_where_torch_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moved: bool) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    if moved:
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "elsewhere"))
    theirs = cpp_extension._get_build_directory(EXTENSION, False)
    assert extension_lock() == Path(theirs, "lock") and tmp_path in extension_lock().parents


def test_megatron_builds_it_under_this_name() -> None:
    from megatron.core.tensor_parallel import random

    assert f'name="{EXTENSION}"' in Path(random.__file__).read_text()


def test_an_old_lock_that_nobody_holds_is_removed_and_named(lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    abandon(lock, 1000)
    clear_abandoned_build(run_with("selective"))
    assert not lock.exists()
    error = capsys.readouterr().err
    assert error.startswith("warning: ") and str(lock) in error and "1000 s old" in error


def test_a_young_one_is_waited_for_and_then_removed(lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    abandon(lock, -500)  # by a clock that is ahead
    clear_abandoned_build(run_with("selective"), abandoned_after_s=0.1)
    assert not lock.exists()
    waiting, removed = capsys.readouterr().err.splitlines()
    assert "waiting" in waiting and str(lock) in waiting and "removed" in removed


def test_the_wait_leaves_the_other_ranks_their_time(lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    abandon(lock, 0)
    clear_abandoned_build(run_with("selective", collective_timeout_s=1.0), abandoned_after_s=4.0)
    assert lock.exists()
    waiting, going_on = capsys.readouterr().err.splitlines()
    assert "waiting" in waiting and "going on" in going_on


@pytest.mark.parametrize("ahead_s", [1000.0, -1000.0])
def test_age_is_told_by_the_clock_that_dates_the_files(
    lock: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    """This machine's is ahead of it: a lock of now looks old. It is behind: an old one looks young."""
    abandon(lock, 0 if ahead_s > 0 else 400)
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + ahead_s)
    clear_abandoned_build(run_with("selective", collective_timeout_s=1.0))
    assert lock.exists() == (ahead_s > 0)
    error = capsys.readouterr().err
    assert f"{lock} is 0 s old" in error if ahead_s > 0 else f"removed {lock}, 400 s old" in error
    assert [path.name for path in lock.parent.iterdir()] == (["lock"] if ahead_s > 0 else [])


def test_a_build_that_runs_is_left_alone(lock: Path) -> None:
    builder = subprocess.Popen([sys.executable, "-c", BUILD, str(lock)], stdout=subprocess.PIPE, text=True)
    try:
        assert builder.stdout is not None and builder.stdout.readline() == "building\n"
        os.utime(lock, (time.time() - 1000,) * 2)
        clear_abandoned_build(run_with("selective"))
        assert lock.exists()
    finally:
        builder.kill()
        builder.wait()
    clear_abandoned_build(run_with("selective"))
    assert not lock.exists()


def test_only_selective_recomputation_builds(lock: Path) -> None:
    abandon(lock, 1000)
    for recompute in ("none", "full"):
        clear_abandoned_build(run_with(recompute))
    assert lock.exists()


def test_one_that_cannot_be_removed_is_named(lock: Path) -> None:
    lock.mkdir()  # as good as a file to those who wait for it
    os.utime(lock, (time.time() - 1000,) * 2)
    with pytest.raises(UserError, match=rf"{lock} .*cannot be removed.*delete it"):
        clear_abandoned_build(run_with("selective"))


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_a_start_clears_it_once_on_each_node(lock: Path, monkeypatch: pytest.MonkeyPatch, local_rank: str) -> None:
    class Reached(Exception):
        pass

    def reached(*_: object) -> None:
        raise Reached

    abandon(lock, 1000)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(session, "open_world", reached)
    cfg = run_with("selective")
    with pytest.raises(Reached):
        session.train(cfg, check_config(cfg, 1))
    assert lock.exists() == (local_rank != "0")
