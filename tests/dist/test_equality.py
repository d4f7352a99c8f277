"""Every layout on two or four gloo ranks is the same training as one rank: weights, loss, gradients, norm, three steps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.harness import results, start_worker
from tests.dist.layouts import cases

pytestmark = [pytest.mark.dist, pytest.mark.timeout(500)]
ERROR = 1e-5  # relative; see the measured errors in the assertion of test_equals_one_rank
NUMBERS = ("loss", "grad_norm", "last_loss", "last_grad_norm", "evaluation")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """Number of ranks -> per rank: case -> errors. One start of the ranks for all cases: imports cost more than
    training."""
    folder = tmp_path_factory.mktemp("equality")
    results(start_worker(1, "equality_worker.py", folder / "serial"), folder / "serial", 1)
    outcome = {}
    for ranks in (2, 4):
        job = start_worker(ranks, "equality_worker.py", folder / str(ranks), str(folder / "serial"))
        outcome[ranks] = results(job, folder / str(ranks), ranks)
    return outcome


def names(*, dropout: bool) -> list[tuple[int, str]]:
    """(ranks, name) of the cases."""
    return [(ranks, "-".join(case)) for ranks in (2, 4) for case in cases(ranks) if (case[0] == "dropout") == dropout]


@pytest.mark.parametrize(("ranks", "case"), names(dropout=False))
def test_equals_one_rank(found: dict[int, list[dict[str, Any]]], ranks: int, case: str) -> None:
    for rank in found[ranks]:
        errors = rank[case]
        assert errors["drifted"] == []
        assert errors["initial"] == 0
        assert all(errors[key] <= 1e-6 for key in NUMBERS), errors
        assert errors["gradient"] <= ERROR and errors["weight"] <= ERROR, errors


@pytest.mark.parametrize(("ranks", "case"), names(dropout=True))
def test_replicas_stay_identical_with_dropout(
    found: dict[int, list[dict[str, Any]]], ranks: int, case: str
) -> None:
    """Ranks that hold a copy of a weight must see the same dropout, or their copies drift apart unnoticed."""
    assert all(rank[case]["drifted"] == [] for rank in found[ranks])
