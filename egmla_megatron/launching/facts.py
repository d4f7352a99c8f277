"""What one node has and can reach, as plain data that the nodes compare; without torch, so that it takes a moment."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from egmla_megatron.config.schema import RunConfig
from egmla_megatron.data.blend import parse_blend
from egmla_megatron.data.verify import verify_prefix
from egmla_megatron.environment import gpu_count, whole_number
from egmla_megatron.errors import UserError
from egmla_megatron.train.machine import check_machine

__all__ = ["BUSY_MIB", "gather_facts", "node_name"]

Facts = dict[str, Any]
BUSY_MIB = 2048  # of a GPU's memory in use before a job starts: another process is there
LEAST_SHM_MIB = 64  # loader processes and NCCL pass data through /dev/shm
SHARED_LIMIT_S = 15.0  # for a file to be seen by the other nodes of a shared disk


def node_name(nodes: Sequence[str] = ()) -> str:
    """This node's name, as Slurm knows it; the host's own may have a domain more or less than that in `nodes`."""
    name = os.environ.get("SLURMD_NODENAME") or platform.node()
    if name in nodes:
        return name
    short = name.partition(".")[0]
    alike = [node for node in nodes if node.partition(".")[0] == short and not ("." in node and "." in name)]
    return alike[0] if len(alike) == 1 else name


def gather_facts(cfg: RunConfig, *, token: str, limit_s: float) -> Facts:
    """Everything known of this node within `limit_s` seconds. `problems` holds what is wrong with it, in words.

    A disk or a driver that hangs would hang this process too: the questions are asked by a thread that is left behind.

    Args:
        token: name of a file that the first node has put into the run folder's parent, see `shared_probe`.
    """
    facts: Facts = {"node": node_name(), "problems": [], "warnings": []}
    asked = [""]

    def ask() -> None:
        for name, question in _QUESTIONS.items():
            asked[0] = name
            try:
                question(cfg, facts, token)
            except UserError as error:
                facts["problems"].append(str(error))
            except Exception as error:  # whatever is broken there is what the first node must hear of
                facts["problems"].append(f"{name}: {type(error).__name__}: {error}")
        asked[0] = ""

    thread = threading.Thread(target=ask, name="facts", daemon=True)
    thread.start()
    thread.join(limit_s)
    if asked[0]:
        facts = {**facts, "problems": [*facts["problems"], f"{asked[0]}: no answer within {limit_s:.0f} s"]}
    return facts


def _versions(cfg: RunConfig, facts: Facts, token: str) -> None:
    """Python, all packages, and this package's own source: checkouts and environments may lie on local disks."""
    packages: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            packages.setdefault(name.lower().replace("_", "-"), distribution.version)
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    facts["versions"] = {
        "python": platform.python_version(),
        "egmla_megatron source": digest.hexdigest()[:12],
        **packages,
    }
    facts["executable"] = sys.executable


def _gpus(cfg: RunConfig, facts: Facts, token: str) -> None:
    given, seen = whole_number("SLURM_GPUS_ON_NODE", 0, 0), gpu_count()
    facts["gpus"], facts["gpu_kinds"] = seen, {"number of GPUs": str(seen)}
    if seen < given:
        raise UserError(f"GPUs: Slurm gave {given}, the driver shows {seen}; look at nvidia-smi there")
    check_machine(cfg)
    ranks = whole_number("LOCAL_WORLD_SIZE", 1, 1)
    if seen > ranks:
        facts["warnings"].append(f"{seen} GPUs are there, {ranks} are used (sbatch --gpus-per-node, EGMLA_NPROC)")
    if not facts["gpus"] or shutil.which("nvidia-smi") is None:
        return
    fields = "name,driver_version,memory.used,ecc.errors.uncorrected.volatile.total"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise UserError(f"GPUs: nvidia-smi failed ({' '.join((done.stdout + done.stderr).split())[:200]})")
    rows = [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    facts["gpu_kinds"] |= {"GPU": ", ".join(sorted({row[0] for row in rows})), "driver": rows[0][1]}
    for number, (_, _, used, ecc) in enumerate(rows):
        if used.isdigit() and int(used) > BUSY_MIB:
            facts["warnings"].append(f"GPU {number} has {used} MiB in use by another process")
        if ecc.isdigit() and int(ecc) > 0:
            facts["problems"].append(
                f"GPU {number} has {ecc} uncorrected memory errors; reset it or leave this node out"
            )


def _disks(cfg: RunConfig, facts: Facts, token: str) -> None:
    run_dir = Path(cfg.run.dir).absolute()
    existing = next(parent for parent in (run_dir, *run_dir.parents) if parent.is_dir())
    facts["free_mib"] = shutil.disk_usage(existing).free >> 20
    for folder in ("/tmp", "/dev/shm"):
        if Path(folder).is_dir() and shutil.disk_usage(folder).free >> 20 < LEAST_SHM_MIB:
            facts["problems"].append(f"{folder} has less than {LEAST_SHM_MIB} MiB left; empty it")
    probe, deadline = existing / token, time.monotonic() + SHARED_LIMIT_S
    while token and not probe.exists():
        if time.monotonic() > deadline:
            raise UserError(f"run.dir: {existing} is not the first node's; put run.dir on a disk that all nodes share")
        time.sleep(0.1)
        os.listdir(existing)  # makes a network disk look again


def _data(cfg: RunConfig, facts: Facts, token: str) -> None:
    """Sizes and headers of every data set; on the first node also samples of its ids."""
    facts["data"] = {}
    for key, entries in (("data.train", cfg.data.train), ("data.valid", cfg.data.valid)):
        for prefix in parse_blend(entries, key)[0]:
            info = verify_prefix(prefix, vocab_size=cfg.model.vocab_size, sample=not token)
            facts["data"][prefix] = f"{info.tokens} tokens in {info.sequences} sequences"


_QUESTIONS: dict[str, Callable[[RunConfig, Facts, str], None]] = {
    "versions": _versions,
    "GPUs": _gpus,
    "disks": _disks,
    "data": _data,
}
