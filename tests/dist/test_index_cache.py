"""The cache of sample indices with several ranks: one build on a shared disk, one per node on disks of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.harness import results, start_worker
from tests.tiny import write_run

pytestmark = pytest.mark.dist


@pytest.mark.slow
def test_jobs_that_start_together_and_nodes_with_disks_of_their_own(tmp_path: Path) -> None:
    """Two jobs of two ranks at the same time on one cache, then one whose ranks see different disks."""
    config, _ = write_run(tmp_path, "run")
    (tmp_path / "cache").mkdir()
    folders = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    for folder in folders[:2]:
        folder.mkdir()
        (folder / "cache").symlink_to(tmp_path / "cache")
    jobs = [start_worker(2, "cache_worker.py", folder, str(config), "shared") for folder in folders[:2]]
    ranks = [rank for job, folder in zip(jobs, folders, strict=False) for rank in results(job, folder, 2)]
    assert ranks[0]["files"] == ranks[3]["files"]
    ranks += results(start_worker(2, "cache_worker.py", folders[2], str(config), "own"), folders[2], 2)
    assert all(rank["train"] == ranks[0]["train"] and rank["valid"] == ranks[0]["valid"] for rank in ranks)
    assert len(ranks) == 6 and len(ranks[0]["train"]) > 20
    assert all(len(rank["files"]) == 6 for rank in ranks)  # 3 for each split
    assert not ranks[4]["unfinished"] and not [p for p in (tmp_path / "cache").iterdir() if p.name.startswith(".")]
