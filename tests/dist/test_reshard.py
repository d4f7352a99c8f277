"""A checkpoint goes from 1 rank to 2, 3 and 4, through every kind of layout, and back: nothing in it changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.chains import CHAINS
from tests.dist.harness import results, start_worker

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Chain -> layout -> what became of the checkpoint there."""
    everything: dict[str, dict[str, Any]] = {chain: {} for chain in CHAINS}
    folders: dict[str, Path] = {chain: tmp_path_factory.mktemp(chain) for chain in CHAINS}
    for ranks in (1, 2, 3, 4):  # both chains side by side: ranks that wait for each other leave half of the CPUs
        jobs = {chain: start_worker(ranks, "reshard_worker.py", folders[chain], chain) for chain in CHAINS}
        for chain, job in jobs.items():
            everything[chain] |= results(job, folders[chain], ranks)[0]
    return everything


@pytest.mark.parametrize(("chain", "layout"), [(chain, link[0]) for chain, links in CHAINS.items() for link in links])
def test_weights_and_optimizer_states_come_back_bit_for_bit(
    found: dict[str, dict[str, Any]], chain: str, layout: str
) -> None:
    first, here = found[chain]["serial"], found[chain][layout]
    assert here["changed"] == [] and here["tensors"] == first["tensors"] > 40
    assert here["numbers"] == pytest.approx(first["numbers"], rel=1e-6)  # one more step of training


def test_a_bf16_checkpoint_goes_on_in_fp32_alike_on_all_ranks(tmp_path: Path) -> None:
    """Every rank has fp32 weights for its own share alone, which it hands to the others."""
    for found in results(start_worker(2, "precision_worker.py", tmp_path), tmp_path, 2):
        assert found == {"apart": 0.0, "rounded": False}
