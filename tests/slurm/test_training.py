"""Real training through the launch scripts on a real Slurm: whatever ends it, the run goes on as if nothing had."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.harness import events, trained
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import LIMIT_S, SAVED, STEPS, SlurmJob, submit, tiny_settings

pytestmark = [pytest.mark.slurm, pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(900)]

LISTEN = "import socket, time; s = socket.create_server(('', {port})); print('listening', flush=True); time.sleep(600)"


def quiet_site(folder: Path) -> str:
    path = folder / "site.sh"
    path.write_text("SITE_PREFLIGHT=nodes\n")
    return str(path)


@pytest.fixture(scope="module")
def reference(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> SlurmJob:
    """The run without any interruption, on two other nodes at the same time."""
    folder = tmp_path_factory.mktemp("whole")
    arguments, run = tiny_settings(folder, "run")
    options = ["--nodes=2", "--nodelist=node3,node4"]
    return submit(cluster, folder, run, arguments, options=options, EGMLA_SITE=quiet_site(folder))


def whole(reference: SlurmJob) -> dict[int, tuple[float, float, float]]:
    """Its curve."""
    assert reference.wait_for_end() == "COMPLETED", reference.output
    assert sorted(trained(reference.run)) == list(range(1, STEPS + 1))
    return trained(reference.run)


def test_signal_before_the_limit_a_killed_rank_and_scancel(
    cluster: Cluster, tmp_path: Path, reference: SlurmJob
) -> None:
    """One job on two nodes, started three times: Slurm warns of its limit, a rank is killed, somebody cancels it."""
    folder = tmp_path / "with a space"
    folder.mkdir()
    arguments, run = tiny_settings(folder, "run")
    options = ["--nodes=2", "--nodelist=node1,node2"]
    job = submit(cluster, folder, run, arguments, options=options, EGMLA_SITE=quiet_site(folder))
    job.wait_for_step(3, launch=1)
    cluster.call("scancel", "--batch", "--signal=USR1", job.number)  # as --signal=B:USR1@300 does
    job.wait_for_step(9, launch=2)
    (rank,) = job.pids("node2", "^[^ ]*python[^ ]* -u -m egmla_megatron.train")
    cluster.run_on("node2", "kill", "-KILL", str(rank))
    job.wait_for_step(17, launch=3)
    cluster.call("scancel", job.number)
    assert job.wait_for_end() == "CANCELLED", job.output
    assert "the job was cancelled; submit it again to resume" in job.output
    assert "Traceback" not in job.output and "resource_tracker" not in job.output
    assert [(launch.restart, launch.outcome) for launch in job.launches] == [(0, "saved"), (1, "crash"), (2, "saved")]
    assert "was killed by SIGKILL" in job.launches[1].said
    starts = [start["step"] for start in events(run, "start")]
    assert starts[1] == job.launches[0].reached and starts[2] % SAVED == 0
    got, expected = trained(run), whole(reference)
    assert sorted(got) == list(range(1, job.launches[2].reached + 1))
    assert got == {step: expected[step] for step in got}


@pytest.mark.skipif(
    not os.environ.get("EGMLA_LONG_TESTS"), reason="takes four minutes of two cores: EGMLA_LONG_TESTS=1 runs it"
)
def test_dead_nodes_and_fewer_of_them(cluster: Cluster, tmp_path: Path, reference: SlurmJob) -> None:
    """Four nodes, of which one and then the first, with the script itself, lose power: the job goes on, on three and
    on two. The port that belongs to the job's number is taken."""
    expected = whole(reference)
    cluster.wait_until(cluster.all_idle, LIMIT_S)  # or the job would begin on fewer than four
    arguments, run = tiny_settings(tmp_path, "run", parallel={"gate_group": 3})
    options = ["--nodes=2-4", "--hold"]
    job = submit(cluster, tmp_path, run, arguments, options=options, EGMLA_SITE=quiet_site(tmp_path))
    port = 20000 + int(job.number)
    listen = cluster.command(sys.executable, "-c", LISTEN.format(port=port), on="node1")
    with subprocess.Popen(listen, stdout=subprocess.PIPE, text=True) as squatter:
        try:
            assert squatter.stdout is not None and squatter.stdout.readline() == "listening\n"
            cluster.call("scontrol", "release", job.number)
            job.wait_for_step(6, launch=1)
            cluster.kill("node4")
            job.wait_for_step(15, launch=2)
        finally:
            squatter.kill()
    cluster.kill("node1")
    assert job.wait_for_end() == "COMPLETED"
    for node in ("node1", "node4"):
        cluster.boot(node)
    assert f"port {port} of node1 is in use" in job.output
    outcomes = [(launch.outcome, len(launch.nodes)) for launch in job.launches]
    assert outcomes == [("crash", 4), ("lost", 3), ("done", 2)], job.output
    assert "(node4, pid" in job.launches[0].said, job.launches[0].said  # the rank that is gone is named
    assert "adapted: parallel.gate_group 3 -> 2: the largest below it that divides the 4 ranks" in job.output
    layouts = [(start["layout"]["dp"], start["layout"]["gate_group"]) for start in events(run, "start")]
    assert layouts == [(4, 2), (3, 3), (2, 2)]
    got = trained(run)
    assert got.keys() == expected.keys()
    for step, values in got.items():
        assert values[0] == pytest.approx(expected[step][0], rel=1e-6), f"step {step}"
        assert values[1] == pytest.approx(expected[step][1], rel=3e-5), f"step {step}"


def test_a_preemption_while_the_ranks_start_is_no_crash(cluster: Cluster, tmp_path: Path) -> None:
    """SIGTERM to every process of the step and none to the script: the step's exit code alone tells."""
    site = tmp_path / "site.sh"
    site.write_text("SITE_PREFLIGHT=off\n")
    arguments, run = tiny_settings(tmp_path, "run", train={"steps": 4})
    job = submit(cluster, tmp_path, run, arguments, options=["--nodes=2"], EGMLA_SITE=str(site))
    job.wait_for(lambda: job.launches and job.pids("node1", "-u -m egmla_megatron.train"), "the start of a rank")
    cluster.call("scancel", "--signal=TERM", job.number)
    job.wait_for(lambda: "interrupted before it could save at step 0" in job.output, "the requeue")
    assert job.wait_for_end() == "COMPLETED", job.output
    outcomes = [(launch.outcome, launch.code) for launch in job.launches]
    assert outcomes == [("interrupted", 128 + signal.SIGTERM), ("done", 0)], job.output
    assert "error: rank" not in job.output
