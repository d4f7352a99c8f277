"""What a launch script does with ends of all kinds, on a real Slurm; the ranks are stand-ins that end at once."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SlurmJob, stand_in, submit, tiny_settings

pytestmark = [pytest.mark.slurm, pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(300)]


def site_without_links(folder: Path, *lines: str) -> str:
    path = folder / "site of tests.sh"
    path.write_text("\n".join(["SITE_PREFLIGHT=nodes", *lines]) + "\n")
    return str(path)


def errors(job: SlurmJob) -> list[str]:
    return [line for line in job.output.splitlines() if line.startswith("error: ")]


@pytest.fixture(scope="module")
def limited(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> SlurmJob:
    """A job on node4 that Slurm warns of its time limit, within a minute; the other tests run meanwhile."""
    folder = tmp_path_factory.mktemp("limited")
    arguments, run = tiny_settings(folder, "run")
    python = stand_in(folder, f"cd '{folder}'; [ ! -e warned ] || exit 0; trap 'touch warned; exit 138' USR1; "
                              "sleep 300 & wait")  # fmt: skip
    options = ["--nodes=1", "--nodelist=node4", "--time=1", "--signal=B:USR1@10"]
    return submit(
        cluster,
        folder,
        run,
        arguments,
        options=options,
        EGMLA_PYTHON=str(python),
        EGMLA_SITE=site_without_links(folder),
    )


def test_three_crashes_at_one_step_end_the_job_with_a_diagnosis(
    cluster: Cluster, limited: SlurmJob, tmp_path: Path
) -> None:
    arguments, run = tiny_settings(tmp_path, "run")
    python = stand_in(tmp_path, "echo 'RuntimeError: the same bug' >&2; exit 1")
    job = submit(cluster, tmp_path, run, arguments, options=["--nodes=2"],
                 EGMLA_PYTHON=str(python), EGMLA_SITE=site_without_links(tmp_path))  # fmt: skip
    assert job.wait_for_end() == "FAILED", job.output
    assert job.field("Restarts") == "2"
    assert [(launch.outcome, launch.restart) for launch in job.launches] == [("crash", 0), ("crash", 1), ("crash", 2)]
    assert "3 crashes in a row at step 0, not started again. Last words: RuntimeError: the same bug" in job.output
    assert job.output.count("the job starts again by itself") == 2


def test_bad_input_ends_a_job_at_once_with_one_line(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    arguments, run = tiny_settings(folder, "run")
    python = stand_in(folder, "echo 'the ranks were started' >&2; exit 1")
    common = {"EGMLA_PYTHON": str(python), "EGMLA_SITE": site_without_links(folder)}
    typo = folder / "typo.sh"
    typo.write_text("SITE_ACOUNT=mine\n")
    cases = {
        "checkpoint.resume=required: ": submit(
            cluster, folder, run, [*arguments, "checkpoint.resume=required"], options=["--nodes=1"], **common
        ),
        "override 'optimizer.lrr=1': unknown key in section optimizer: 'lrr'; did you mean lr?": submit(
            cluster, folder, run, [*arguments, "optimizer.lrr=1"], options=["--nodes=1"], **common
        ),
        f"{typo}: unknown key SITE_ACOUNT; allowed SITE_ACCOUNT ": submit(
            cluster, folder, run, arguments, options=["--nodes=1"], **{**common, "EGMLA_SITE": str(typo)}
        ),
        "number of nodes: got 3 with 1 ranks each, which the layout cannot use (train.global_batch_size = 4 does not "
        "divide over 3 replicas); allowed next to it: 2 or 4; fix: sbatch --nodes=4": submit(
            cluster, folder, run, [*arguments, "train.global_batch_size=4"], options=["--nodes=3"], **common
        ),
    }
    for message, job in cases.items():
        assert job.wait_for_end() == "FAILED", job.output
        assert job.field("ExitCode") == "2:0"
        (error,) = errors(job)
        assert error.startswith(f"error: {message}"), error
        assert "ranks were started" not in job.output and job.field("Restarts") == "0"
    assert not run.exists()


def test_nodes_that_cannot_work_are_named(cluster: Cluster, tmp_path: Path) -> None:
    """Another version of a package, and a disk that is not shared, each seen by one node only."""
    arguments, run = tiny_settings(tmp_path, "run")
    python = stand_in(tmp_path, "exit 1")
    common = {"EGMLA_PYTHON": str(python), "EGMLA_SITE": site_without_links(tmp_path)}
    metadata = Path(importlib.metadata.distribution("tqdm")._path) / "METADATA"  # type: ignore[attr-defined]
    version = importlib.metadata.version("tqdm")
    other = tmp_path / "METADATA"
    other.write_text(metadata.read_text().replace(f"Version: {version}", "Version: 1.2.3", 1))
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    local = submit(cluster, tmp_path, run, [*arguments, f"run.dir={hidden}/run"],
                   options=["--nodes=2", "--nodelist=node1,node3", "--hold"], **common)  # fmt: skip
    different = submit(cluster, tmp_path, run, arguments,
                       options=["--nodes=2", "--nodelist=node1,node2", "--hold"], **common)  # fmt: skip
    mounts = [("node2", "--bind", str(other), str(metadata)), ("node3", "-t", "tmpfs", "tmpfs", str(hidden))]
    for node, *mount in mounts:
        assert cluster.run_on(node, "mount", *mount).returncode == 0
    try:
        for job in (local, different):
            cluster.call("scontrol", "release", job.number)
        assert different.wait_for_end() == "FAILED" and local.wait_for_end() == "FAILED"
    finally:
        for node, *mount in mounts:
            cluster.run_on(node, "umount", mount[-1])
    (error,) = errors(different)
    assert error.startswith(
        f"error: nodes: node2: tqdm 1.2.3, elsewhere {version}; make all nodes alike, or leave it out"
    ), error
    (error,) = errors(local)
    assert error.startswith(f"error: nodes: node3: run.dir: {hidden} is not the first node's; put run.dir on"), error
    assert not run.exists() and not any(hidden.iterdir())


def test_the_warning_before_the_time_limit_starts_the_job_again(limited: SlurmJob) -> None:
    assert limited.wait_for_end() == "COMPLETED", limited.output
    assert [(launch.outcome, launch.restart) for launch in limited.launches] == [("interrupted", 0), ("done", 1)]
    assert "interrupted before it could save at step 0" in limited.output and "TIME LIMIT" not in limited.output


HOLD = """
import sys, time
from pathlib import Path
from egmla_megatron.train.lock import lock_run_dir
lock = lock_run_dir(Path(sys.argv[1]))
print("training", flush=True)
time.sleep(300)
"""


def test_a_second_job_in_the_same_folder_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    arguments, run = tiny_settings(tmp_path, "run")
    (tmp_path / "hold.py").write_text(HOLD)
    python = stand_in(tmp_path, f"exec '{sys.executable}' '{tmp_path}/hold.py' '{run}'")
    common = {"EGMLA_PYTHON": str(python), "EGMLA_SITE": site_without_links(tmp_path)}
    first = submit(cluster, tmp_path, run, arguments, options=["--nodes=1"], **common)
    first.wait_for(lambda: "training" in first.output, "the lock")
    second = submit(cluster, tmp_path, run, arguments, options=["--nodes=1"], **common)
    assert second.wait_for_end() == "FAILED" and second.field("ExitCode") == "2:0"
    (error,) = errors(second)
    assert f"error: run.dir: {run} is in use by {first.field('NodeList')}, pid " in error
    assert first.state == "RUNNING" and [launch.job for launch in first.launches] == [first.number]
    cluster.call("scancel", first.number)
    assert first.wait_for_end() == "CANCELLED", first.output
