"""Four nodes with networks of their own, one of them behind a slow cable: it is reported by name before training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import stand_in, submit, tiny_settings

pytestmark = [pytest.mark.slurm, pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(300)]

TRAINING_ONLY = 'case " $* " in *" -m egmla_megatron.train "*) exit 0 ;; esac'


def test_a_slow_node_is_named(machine: None, tmp_path: Path) -> None:
    arguments, run = tiny_settings(tmp_path, "run")
    site = tmp_path / "site.sh"
    site.write_text("SITE_INTERFACE=eth0\nSITE_LEAST_GB_PER_S=100\n")
    cluster = Cluster(4, networks=True)
    try:
        cluster.shape("node3", "20mbit")
        # the ranks that measure are real; what follows them is not, and is never reached
        python = stand_in(tmp_path, f"{TRAINING_ONLY};")
        job = submit(cluster, tmp_path, run, arguments, options=["--nodes=4"],
                     EGMLA_PYTHON=str(python), EGMLA_SITE=str(site))  # fmt: skip
        assert job.wait_for_end() == "FAILED", job.output
    finally:
        cluster.stop()
    assert "nodes    4 alike" in job.output
    warnings = [line for line in job.output.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1 and warnings[0].startswith("warning: node3 is slow: 0.00"), job.output
    assert "sbatch --exclude=node3" in warnings[0]
    (error,) = [line for line in job.output.splitlines() if line.startswith("error: ")]
    assert error.endswith("allowed at least 100 (SITE_LEAST_GB_PER_S); slow: node3"), error
    assert not run.exists()
