"""Submits the real launch scripts to a Cluster and follows the jobs."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from egmla_megatron.config.load import to_dict
from egmla_megatron.config.schema import ModelConfig
from egmla_megatron.launching.ledger import Launch, read_launches
from tests.dist.harness import ROOT, environment
from tests.slurm.cluster import Cluster
from tests.tiny import TINY, tiny_run, write_dataset

__all__ = ["LIMIT_S", "SAVED", "STEPS", "SlurmJob", "settings", "stand_in", "submit", "tiny_settings"]

LIMIT_S = 400.0  # for anything that is waited for
LIVING = ("RUNNING", "PENDING", "COMPLETING", "CONFIGURING", "REQUEUED")
RESTART_S = 3.0  # Slurm waits for two minutes before it starts a job again; within a second the nodes would refuse it
STEPS, SAVED = 40, 4  # of a run; steps between its checkpoints


def settings(cfg: Any) -> list[str]:
    """A whole configuration as section.key=value."""
    found = []
    for section, values in to_dict(cfg).items():
        for key, value in values.items():
            text = "[" + ", ".join(map(str, value)) + "]" if isinstance(value, list) else str(value)
            found.append(f"{section}.{key}={text.lower() if isinstance(value, bool) else text}")
    return found


def tiny_settings(folder: Path, name: str, model: ModelConfig = TINY, **changes: Any) -> tuple[list[str], Path]:
    """(settings, run folder) of a tiny run that four, three or two ranks can train, on data made in FOLDER/data."""
    prefixes = {}
    for seed, split in enumerate(("train", "valid")):
        prefix = folder / "data" / split
        prefixes[split] = (str(prefix),)
        if not prefix.with_suffix(".bin").exists():
            write_dataset(prefix, 20, seed=seed)
    run = folder / name
    sections: dict[str, Any] = {
        "data": prefixes,
        "train": {"steps": STEPS, "global_batch_size": 12, "peer_timeout_s": 8.0},
        # a large eps keeps Adam from making steps of the rounding that another number of ranks brings
        "optimizer": {"distributed": True, "lr": 1e-2, "warmup_steps": 2, "eps": 1e-3},
        "parallel": {"implementation": "torch", "gate_group": 2},
        "checkpoint": {"interval_steps": SAVED, "keep": 0},
    }
    sections = {key: {**sections.get(key, {}), **changes.get(key, {})} for key in sections.keys() | changes.keys()}
    return settings(tiny_run(model, str(run), **sections)), run


@dataclass
class SlurmJob:
    """A submitted job."""

    cluster: Cluster
    number: str
    log: Path
    run: Path

    @property
    def output(self) -> str:
        """stdout and stderr of all its starts so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def state(self) -> str:
        """RUNNING, PENDING, COMPLETED, ..."""
        return self.field("JobState")

    def field(self, name: str) -> str:
        """One field of Slurm's record."""
        shown = self.cluster.call("scontrol", "show", "job", self.number)
        match = re.search(rf"\b{name}=(\S+)", shown)
        assert match, shown
        return match[1]

    @property
    def launches(self) -> list[Launch]:
        """What the launch scripts recorded."""
        return read_launches(self.run)

    def wait_for(self, condition: Any, what: str) -> None:
        """Wait until a condition holds; a requeued job need not wait for its turn."""
        deadline, waiting_since = time.monotonic() + LIMIT_S, 0.0
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} did not happen:\n{self.output[-6000:]}\n{self.cluster.logs()}")
            state = self.state
            assert state in LIVING or condition(), f"{what} did not happen, the job is {state}:\n{self.output[-6000:]}"
            waiting_since = waiting_since or time.monotonic() if state == "PENDING" else 0.0
            if waiting_since and time.monotonic() - waiting_since > RESTART_S:
                self.cluster.attempt("scontrol", "update", f"JobId={self.number}", "StartTime=now")
                waiting_since = 0.0
            time.sleep(0.1)

    def wait_for_step(self, step: int, launch: int) -> None:
        """Wait until the given launch (1: the first) has done a step."""

        def there() -> bool:
            parts = self.output.split("\nlauncher: job ")
            return len(parts) > launch - 1 and any(
                int(found) >= step for found in re.findall(r"^step +(\d+)/", parts[-1], re.MULTILINE)
            ) and len(self.launches) >= launch  # fmt: skip

        self.wait_for(there, f"step {step} of launch {launch}")

    def wait_for_end(self) -> str:
        """State of the job after it has ended for good."""
        self.wait_for(lambda: self.state not in LIVING, "the end")
        return self.state

    def pids(self, node: str, word: str) -> list[int]:
        """Processes of a node, as the node counts, whose command line has `word`."""
        done = self.cluster.run_on(node, "pgrep", "-f", "--", word)
        return [int(line) for line in done.stdout.split()]


def submit(
    cluster: Cluster,
    folder: Path,
    run: Path,
    arguments: Sequence[str],
    *,
    script: str = "pretrain_base",
    options: Sequence[str] = (),
    root: Path = ROOT,
    **variables: str,
) -> SlurmJob:
    """sbatch a launch script from `folder`, one CPU rank on every node."""
    env = environment(EGMLA_VENV="none", EGMLA_PYTHON=sys.executable, EGMLA_NPROC="1", EGMLA_PREFLIGHT_S="150")
    env = {name: value for name, value in env.items() if not name.startswith(("SLURM_", "PET_"))} | variables
    command = ["sbatch", "--parsable", "--gpus-per-node=0", *options, str(root / "launch" / f"{script}.sh"), *arguments]
    number = cluster.call(*command, cwd=folder, env=env).strip()
    return SlurmJob(cluster, number, folder / f"{script}_{number}.out", run)


def stand_in(folder: Path, for_launcher: str) -> Path:
    """A Python that runs `for_launcher` (bash) instead of every launch of ranks, and is the real one otherwise."""
    path = folder / "stand_in_python"  # Slurm does not find processes with a space in their name
    path.write_text(f'#!/bin/bash\ncase " $* " in *" -m egmla_megatron.launch "*) {for_launcher} ;; esac\n'
                    f'exec "{sys.executable}" "$@"\n')  # fmt: skip
    path.chmod(0o755)
    return path
