"""Every layout on two gloo ranks is the same training as one rank: weights, loss, gradients, norm, three steps."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.harness import results, start_worker
from tests.dist.layouts import cases

pytestmark = [pytest.mark.dist, pytest.mark.timeout(500)]
ERROR = 1e-5  # relative; see the measured errors in the assertion of test_equals_one_rank
NUMBERS = ("loss", "grad_norm", "last_loss", "last_grad_norm", "evaluation")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Per rank: case -> errors. One start of the ranks for all cases, since imports cost more than training."""
    folder = tmp_path_factory.mktemp("equality")
    results(start_worker(1, "equality_worker.py", folder / "serial"), folder / "serial", 1)
    job = start_worker(2, "equality_worker.py", folder / "two", str(folder / "serial"))
    return results(job, folder / "two", 2)


@pytest.mark.parametrize("case", ["-".join(case) for case in cases() if case[0] != "dropout"])
def test_equals_one_rank(found: list[dict[str, Any]], case: str) -> None:
    for rank in found:
        errors = rank[case]
        assert errors["drifted"] == []
        assert errors["initial"] == 0
        assert all(errors[key] <= 1e-6 for key in NUMBERS), errors
        assert errors["gradient"] <= ERROR and errors["weight"] <= ERROR, errors


@pytest.mark.parametrize("case", ["-".join(case) for case in cases() if case[0] == "dropout"])
def test_replicas_stay_identical_with_dropout(found: list[dict[str, Any]], case: str) -> None:
    """Ranks that hold a copy of a weight must see the same dropout, or their copies drift apart unnoticed."""
    assert all(rank[case]["drifted"] == [] for rank in found)
