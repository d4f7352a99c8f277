"""What apptainer and pyxis are told. The stand-ins read their arguments as the real programs do, by their manuals."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch_desk import APPTAINER, SRUN, Desk, desk

__all__ = ["desk"]  # a fixture

IMAGE = "/images/my egmla.sif"
SITE = (f"SITE_IMAGE='{IMAGE}'", "SITE_MOUNTS='/data:/data,/scratch disk:/scratch:ro'", "SITE_PYTHON=python",
        "SITE_INTERFACE=ib0", "SITE_ENVIRONMENT=(NCCL_DEBUG=WARN B='two words')")  # fmt: skip
# what an image sets wins over what the host exports
INSIDE = "export PYTHONPATH=/of/the/image NCCL_DEBUG=INFO GLOO_SOCKET_IFNAME=eth7\n"
# srun's options all come as --name=value here; what follows runs on the node, in the image
RUN_STEP = (
    INSIDE
    + """
while [[ "$1" == --* ]]; do shift; done
case "$*" in *SLURM_GPUS_ON_NODE*) echo 4; exit ;; esac
export SLURMD_NODENAME=n1 SLURM_NODEID=0
exec "$@"
"""
)
PYTHON = """#!/bin/bash
printf 'python' >&2; printf ' [%s]' "$@" >&2; printf ' in %s with' "$PWD" >&2
printf ' {%s}' "$PYTHONPATH" "$NCCL_DEBUG" "$B" "$GLOO_SOCKET_IFNAME" "${EGMLA_VENV:-}" >&2; echo >&2
case " $* " in *" fit "*) echo parallel.gate_group=2 ;; esac
"""


@pytest.fixture
def mounts(desk: Desk) -> str:
    (desk.bin / "python").write_text(PYTHON)
    (desk.bin / "srun").write_text(SRUN + RUN_STEP)
    started = APPTAINER.replace("/images/egmla.sif", f"'{IMAGE}'").replace("shift; exec", INSIDE + "shift; exec")
    (desk.bin / "apptainer").write_text(started)
    return f"{desk.root}:{desk.root},{desk.home}:{desk.home},/data:/data,/scratch disk:/scratch:ro"


def calls(text: str, program: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(f"{program} ")]


def check_python(desk: Desk, text: str, count: int) -> None:
    """Every Python in the image starts in the job's folder with the job's variables."""
    found = calls(text, "python")
    assert len(found) == count, text
    for line in found:
        assert f" in {desk.home} with {{{desk.root}}} {{WARN}} {{two words}} {{ib0}} " in line, line


def test_apptainer(desk: Desk, mounts: str) -> None:
    """exec [--nv] --bind SRC:DST[:OPTIONS],... --pwd DIR IMAGE COMMAND; nothing is installed on the host."""
    desk.site("SITE_CONTAINER=apptainer", *SITE)
    expected = f"apptainer [exec] [--nv] [--bind] [{mounts}] [--pwd] [{desk.home}] [{IMAGE}] [env] [PYTHONPATH="
    code, _, err = desk.run("pretrain_base.sh", EGMLA_PYTHON="", EGMLA_VENV="")
    assert code == 0, err
    started = calls(err, "apptainer")
    assert len(started) == 2 and all(line.startswith(expected) for line in started)
    assert "[egmla_megatron.train]" in started[-1]
    check_python(desk, err, 2)
    under = desk.slurm(f"{desk.root}/launch/pretrain_base.sh")
    code, _, err = desk.run("pretrain_base.sh", **under)
    assert code == 0, err
    steps = calls(err, "srun")
    assert len(steps) == 3 and all(f"[task] [apptainer] [exec] [--nv] [--bind] [{mounts}]" in step for step in steps)
    assert not any("--container" in step for step in steps)
    check_python(desk, err, 6)  # fit, begin, end; on the nodes: nodes, links, train
    login = {name: value for name, value in under.items() if name not in ("SLURMD_NODENAME", "SLURM_GPUS_ON_NODE")}
    code, _, err = desk.run("evaluate.sh", "tasks", "run", **login)  # a step on the first node, in the image too
    assert code == 0 and len(calls(err, "apptainer")) == 1, err
    assert "[tasks] [run] in" in err
    check_python(desk, err, 1)


def test_pyxis(desk: Desk, mounts: str) -> None:
    """srun --container-image=PATH --container-mounts=SRC:DST[:FLAGS],... --container-workdir=DIR COMMAND."""
    desk.site("SITE_CONTAINER=pyxis", *SITE)
    under = desk.slurm(f"{desk.root}/launch/pretrain_base.sh")
    code, _, err = desk.run("pretrain_base.sh", EGMLA_PYTHON="", EGMLA_VENV="", **under)
    assert code == 0, err
    steps = calls(err, "srun")
    options = f"[--container-image={IMAGE}] [--container-mounts={mounts}] [--container-workdir={desk.home}] "
    assert len(steps) == 6 and all(options in step for step in steps), err
    check_python(desk, err, 6)
    desk.site("SITE_CONTAINER=pyxis", *SITE, "SITE_PYTHON=python9")
    code, _, err = desk.run("bench_sharding.sh", **under)
    assert code == 2 and "error: node n1: python9 is not there" in err, err
    code, _, err = desk.run("pretrain_base.sh")
    assert code == 2 and "pyxis: allowed under Slurm only" in err


def test_folders_that_are_mounted(desk: Desk, mounts: str, tmp_path: Path) -> None:
    """Once, where a job is submitted in the repository; never with the signs that separate mounts."""
    desk.site("SITE_CONTAINER=apptainer", f"SITE_IMAGE='{IMAGE}'", "SITE_PYTHON=python")
    desk.home = desk.root
    code, _, err = desk.run("pretrain_base.sh", EGMLA_PYTHON="", EGMLA_VENV="")
    assert code == 0 and f"[--bind] [{desk.root}:{desk.root}] [--pwd] [{desk.root}]" in err
    desk.home = tmp_path / "a,b"
    desk.home.mkdir()
    code, _, err = desk.run("pretrain_base.sh", EGMLA_PYTHON="", EGMLA_VENV="")
    assert code == 2 and "allowed paths without : and , to be mounted" in err
