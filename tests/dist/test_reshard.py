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
    everything: dict[str, dict[str, Any]] = {}
    for chain in CHAINS:
        folder: Path = tmp_path_factory.mktemp(chain)
        everything[chain] = {}
        for ranks in (1, 2, 3, 4):
            everything[chain] |= results(start_worker(ranks, "reshard_worker.py", folder, chain), folder, ranks)[0]
    return everything


@pytest.mark.parametrize(("chain", "layout"), [(chain, link[0]) for chain, links in CHAINS.items() for link in links])
def test_weights_and_optimizer_states_come_back_bit_for_bit(
    found: dict[str, dict[str, Any]], chain: str, layout: str
) -> None:
    first, here = found[chain]["serial"], found[chain][layout]
    assert here["changed"] == [] and here["tensors"] == first["tensors"] > 40
    assert here["numbers"] == pytest.approx(first["numbers"], rel=1e-6)  # two more steps of training
