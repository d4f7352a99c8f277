"""The launch scripts on a real Slurm with GPUs: two nodes of this machine with one GPU each, NCCL between them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist.harness import ROOT, environment, events, trained
from tests.gpu.small_model import SMALL
from tests.slurm.cluster import Cluster
from tests.slurm.conftest import reason_to_skip
from tests.slurm.jobs import SlurmJob, submit, tiny_settings

pytestmark = [pytest.mark.gpu, pytest.mark.slurm, pytest.mark.timeout(600)]

STEPS, SAVED = 1500, 250  # of 13 ms
# The nodes share one network namespace and are told apart by name alone; NVLink multicast is not theirs to use.
NCCL = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    if reason := reason_to_skip():
        pytest.skip(reason)
    made = Cluster(2, gpus=[f"/dev/nvidia{number}" for number in range(2)])
    try:
        yield made
    finally:
        made.stop()


def start(nodes: Cluster, folder: Path, name: str, *more: str) -> SlurmJob:
    """pretrain_base.sh on both nodes: graphs, fused kernels, tables over both GPUs."""
    arguments, run = tiny_settings(
        folder,
        name,
        SMALL,
        train={
            "seq_length": 128,
            "micro_batch_size": 2,
            "global_batch_size": 8,
            "steps": STEPS,
            "precision": "bf16",
            "cuda_graph": True,
            "peer_timeout_s": 30.0,
        },
        parallel={"implementation": "te", "gate_group": 2},
        checkpoint={"interval_steps": SAVED},
    )
    options = ["--nodes=2", "--gpus-per-node=1"]
    return submit(nodes, folder, run, [*arguments, *more], options=options, EGMLA_NPROC="", **NCCL)


def test_preempted_and_killed_on_gpus(nodes: Cluster, tmp_path: Path) -> None:
    """Slurm warns, then a node loses power; the losses are those of a run that nothing ended."""
    whole = start(nodes, tmp_path, "whole")
    assert whole.wait_for_end() == "COMPLETED", whole.output
    assert "2 nodes with 1 ranks each" in whole.output, whole.output
    (first,) = events(whole.run, "start")
    assert first["layout"]["gate_group"] == 2 and first["layout"]["dp"] == 2
    job = start(nodes, tmp_path, "stopped")
    job.wait_for_step(300, launch=1)
    nodes.call("scancel", "--batch", "--signal=USR1", job.number)
    job.wait_for_step(800, launch=2)
    nodes.kill("node2")
    nodes.boot("node2")
    assert job.wait_for_end() == "COMPLETED", job.output
    outcomes = [launch.outcome for launch in job.launches]
    assert outcomes[0] == "saved" and outcomes[-1] == "done" and len(outcomes) >= 3, job.output
    got, expected = trained(job.run), trained(whole.run)
    assert sorted(got) == sorted(expected) == list(range(1, STEPS + 1))
    # the same kernels on the same data; what differs is the order of sums, in tables padded to another size
    for step in got:
        assert got[step][0] == pytest.approx(expected[step][0], rel=2e-2, abs=1e-2), f"step {step}"
    python = environment(EGMLA_VENV="none", EGMLA_PYTHON=sys.executable)
    status = nodes.call("bash", str(ROOT / "launch" / "status.sh"), str(job.run), env=python)
    assert f"{STEPS}" in status and "the run is complete" in status, status
