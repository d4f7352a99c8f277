"""Predicted resident memory of a training on a CPU against that of the real trainer."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from egmla_megatron.config.check import check_config
from egmla_megatron.config.load import load_config
from egmla_megatron.report.cpu_memory import predict_resident_mib, resident_mib
from tests.dist.harness import environment, events
from tests.tiny import write_dataset

TRAIN = """
import json, sys
import egmla_megatron.train.session
from egmla_megatron.report.cpu_memory import resident_mib
from egmla_megatron.train.main import main
open(sys.argv[1], "w").write(json.dumps(resident_mib()))
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.timeout(200)
def test_the_quickstart_on_one_rank(root: Path, tmp_path: Path) -> None:
    """Three steps of the real model on random ids; a step's peak is that of those before it."""
    prefix = write_dataset(tmp_path / "train", 400, vocab_size=8192)
    own = [f"run.dir={tmp_path / 'run'}", f"data.train=[{prefix}]", "data.eod_id=0", "parallel.gate_group=1"]
    own += ["train.steps=4", "optimizer.warmup_steps=1", "checkpoint.at_end=false", "logging.tensorboard=false"]
    own += ["train.global_batch_size=8"]
    command = [sys.executable, "-W", "ignore", "-c", TRAIN, str(tmp_path / "process"), "quickstart", *own]
    kept = "PYTHONPYCACHEPREFIX"  # where bytecode is kept already, compiling all of torch would take most of the time
    env = environment(**({kept: os.environ[kept]} if kept in os.environ else {}))
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 0, done.stderr[-2000:]
    measured = max(step["peak_memory_mib"] for step in events(tmp_path / "run", "step"))
    cfg = load_config("quickstart", own)
    process = json.loads((tmp_path / "process").read_text())
    parts = predict_resident_mib(cfg, check_config(cfg, 1), process)
    print(f"predicted {parts}, measured {measured}: {parts['total'] / measured - 1:+.1%}")
    assert parts["total"] == pytest.approx(measured, rel=0.15)
    assert process < 0.85 * measured  # so that the process alone would not pass


def test_parts() -> None:
    cfg = load_config("quickstart", ["train.global_batch_size=16"])
    layout = check_config(cfg, 2)
    parts = predict_resident_mib(cfg, layout, 500.0)
    assert parts["process"] == 500.0 and parts["total"] == sum(parts.values()) - parts["total"]
    wider = replace(cfg, train=replace(cfg.train, micro_batch_size=8))
    more = predict_resident_mib(wider, check_config(wider, 2), 500.0)
    assert more["activations"] == pytest.approx(2 * parts["activations"], rel=0.02)
    assert more["weights"] == parts["weights"]
    mine = resident_mib()
    assert mine is None or mine > 1


BLOCKS = """
import ctypes
from egmla_megatron.parallel.heap import map_large_blocks

class Heap(ctypes.Structure):
    _fields_ = [("numbers", ctypes.c_size_t * 10)]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype, libc.malloc.restype = Heap, ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]

def mapped():
    libc.free(libc.malloc(31 * 2**20))  # from then on glibc would put all smaller blocks into the heap
    before = libc.mallinfo2().numbers[3]
    libc.malloc(2 * 2**20)
    return libc.mallinfo2().numbers[3] - before

print(mapped(), map_large_blocks(), mapped())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_large_blocks_stay_out_of_the_heap(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKS], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "True", "1"]

    import torch

    from egmla_megatron.parallel import world

    called: list[bool] = []
    monkeypatch.setattr(world, "map_large_blocks", lambda: called.append(True))
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    world._choose_device(0, deterministic=False)
    assert called == [True] * (not torch.cuda.is_available())
