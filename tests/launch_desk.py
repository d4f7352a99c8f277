"""A desk for the launch scripts: stand-ins for Python and Slurm's programs that print what they were told."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

__all__ = ["APPTAINER", "PYTHON", "SCONTROL", "SRUN", "Desk", "desk"]

# prints its arguments one to a bracket; `fit` answers with an override
PYTHON = """#!/bin/bash
case "$1" in -c) exit 0 ;; esac
printf 'python' >&2; printf ' [%s]' "$@" >&2; echo >&2
case " $* " in *" fit "*) echo parallel.gate_group=2 ;; esac
"""
SCONTROL = """#!/bin/bash
case "$*" in
    "show hostnames"*) printf 'n1\\nn2\\n' ;;
    "show job"*) printf 'JobId=7 JobName=x\\n   JobState=RUNNING Reason=None\\n   Command=%s\\n' "$COMMAND"
                 printf '   StdErr=%s/the log.out\\n' "$HOME" ;;
esac
"""
SRUN = """#!/bin/bash
{ printf 'srun'; printf ' [%s]' "${@//$'\\n'/ }"; echo; } >&2
"""
APPTAINER = """#!/bin/bash
printf 'apptainer' >&2; printf ' [%s]' "$@" >&2; echo >&2
while [ "$1" != /images/egmla.sif ]; do shift; done
shift; exec "$@"
"""
SBATCH = """#!/bin/bash
env | grep '^SBATCH_' | sort; printf ' [%s]' "$@"; echo
"""


class Desk:
    """A checkout in a path with a space, and a PATH with stand-ins before the real programs."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.bin, self.home = folder / "a checkout", folder / "bin", folder / "home of me"
        shutil.copytree(root / "launch", self.root / "launch", ignore=shutil.ignore_patterns("site.sh"))
        for made in (self.bin, self.home, self.root / "tools"):
            made.mkdir()
        programs = {"python": PYTHON, "scontrol": SCONTROL, "srun": SRUN, "apptainer": APPTAINER, "sbatch": SBATCH}
        for name, text in {**programs, "nvidia-smi": "#!/bin/bash\nexit 1\n"}.items():
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)

    def site(self, *lines: str) -> None:
        (self.root / "launch" / "site.sh").write_text("\n".join(lines) + "\n")

    def run(self, script: Path | str, *arguments: str, **extra: str) -> tuple[int, str, str]:
        path = self.root / "launch" / script if isinstance(script, str) else script
        env = {"PATH": f"{self.bin}:{os.environ['PATH']}", "HOME": str(self.home), "EGMLA_VENV": "none"}
        env |= {"EGMLAPYTHON": str(self.bin / "python"), "EGMLA_PROFILES": str(self.home)}
        command = ["bash", str(path), *arguments]
        done = subprocess.run(command, cwd=self.home, env=env | extra, text=True, capture_output=True, timeout=60)
        return done.returncode, done.stdout, done.stderr

    def slurm(self, command: str) -> dict[str, str]:
        """Variables of a batch job on its first node."""
        return {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n1", "COMMAND": command,
                "SLURM_CPUS_ON_NODE": "8", "SLURM_GPUS_ON_NODE": "4"}  # fmt: skip


@pytest.fixture
def desk(root: Path, tmp_path: Path) -> Desk:
    return Desk(root, tmp_path)
