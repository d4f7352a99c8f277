"""The cache of sample indices with several ranks: one build on a shared disk, one per node on disks of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.harness import results, start_worker
from tests.tiny import write_run

pytestmark = pytest.mark.dist


@pytest.mark.slow
def test_shared_and_node_local_caches_give_the_same_samples(tmp_path: Path) -> None:
    config, _ = write_run(tmp_path, "run")
    found = {}
    for nodes in ("shared", "own"):
        folder = tmp_path / nodes
        job = start_worker(2, "cache_worker.py", folder, str(config), nodes)
        found[nodes] = results(job, folder, 2)
    ranks = [*found["shared"], *found["own"]]
    assert all(rank["train"] == ranks[0]["train"] and rank["valid"] == ranks[0]["valid"] for rank in ranks)
    assert len(ranks[0]["train"]) > 20
    assert all(len(rank["files"]) == 6 and not rank["unfinished"] for rank in ranks)  # 3 files for each split


@pytest.mark.slow
def test_two_jobs_that_start_together(tmp_path: Path) -> None:
    config, _ = write_run(tmp_path, "run")
    folders = [tmp_path / "a", tmp_path / "b"]
    (tmp_path / "cache").mkdir()
    for folder in folders:
        folder.mkdir()
        (folder / "cache").symlink_to(tmp_path / "cache")
    jobs = [start_worker(2, "cache_worker.py", folder, str(config), "shared") for folder in folders]
    one, two = (results(job, folder, 2) for job, folder in zip(jobs, folders, strict=True))
    assert one[0]["train"] == two[1]["train"] and one[0]["files"] == two[1]["files"] and len(one[0]["files"]) == 6
