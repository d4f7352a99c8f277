"""Every layout on one, two or four gloo ranks is the same training as one rank: what the parity command proves.

The command starts its ranks itself, which one case tests; the others share one warm start for each number of ranks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from egmla_megatron.parallel.parity.__main__ import WORKER
from egmla_megatron.parallel.parity.cases import all_cases
from egmla_megatron.parallel.parity.table import crash_name, format_table
from egmla_megatron.parallel.parity.verdict import NUMBER_ERROR, TENSOR_ERROR, passes
from tests.dist.harness import Job, start

# On four ranks forming the groups takes longer than training: one case of each kind here, all of them by the command.
ON_FOUR = (
    "deep-dp4_gate2_distributed",
    "deep-tp2_dp2_gate4",
    "deep-tp2_sp_dp2_gate4_all_gather",
    "deep-pp2_vpp2_dp2_gate2_overlap_param",
    "deep-tp2_sp_cp2_gate4",
    "deep-cp2_dp2_gate4_all_gather_full",
)
pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]


def proof(ranks: int, pattern: str, folder: Path) -> Job:
    job = start(ranks, ["-m", WORKER, str(folder), pattern], folder / f"log{ranks}", warm=True)
    job.limit_s = 500.0
    return job


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Case -> errors of every rank."""
    folder: Path = tmp_path_factory.mktemp("parity")
    everything: dict[str, list[dict[str, Any]]] = {}
    jobs = {1: proof(1, "*", folder)}
    jobs[1].succeed()  # the others read its references
    # side by side: ranks that wait for each other leave half of the CPUs
    jobs |= {2: proof(2, "*", folder), 4: proof(4, ",".join(ON_FOUR), folder)}
    for ranks, job in jobs.items():
        job.succeed()
        errors = [json.loads((folder / f"ranks{ranks}_{rank}.json").read_text()) for rank in range(ranks)]
        everything |= {name: [of_rank[name] for of_rank in errors] for name in errors[0]}
    print(format_table(everything)[0])
    return everything


def test_the_command(tmp_path: Path) -> None:
    command = ["-m", "egmla_megatron.parallel.parity", "--ranks=2", "--only=mul-tp2_sp_gate2", "--json"]
    output = start(1, [*command, str(tmp_path / "errors")], tmp_path / "log").succeed()
    assert "1 of 1 cases" in output
    (errors,) = json.loads((tmp_path / "errors").read_text()).values()
    assert len(errors) == 2 and all(passes(of_rank) for of_rank in errors)


@pytest.mark.parametrize(
    ("ranks", "name"),
    [(ranks, case.name) for ranks in (1, 2) for case in all_cases(ranks) if case.layout != "serial"]
    + [(4, name) for name in ON_FOUR],
)
def test_equals_one_rank(found: dict[str, list[dict[str, Any]]], ranks: int, name: str) -> None:
    """With dropout no serial run draws the same numbers: copies of a weight on several ranks must stay identical."""
    assert len(found[name]) == ranks
    for errors in found[name]:
        assert passes(errors), errors
        assert ("loss" in errors) != name.startswith("dropout")


def test_the_verdict_can_be_no() -> None:
    good: dict[str, Any] = {"drifted": [], "gradient_at": "a", "weight_at": "a"}
    good |= dict.fromkeys(("initial", "gradient", "weight"), 0.0)
    good |= dict.fromkeys(("loss", "grad_norm", "last_loss", "last_grad_norm", "evaluation"), 0.0)
    bad: list[dict[str, Any]] = [
        {"drifted": ["a"]},
        {"initial": 1e-9},
        {"gradient": 2 * TENSOR_ERROR["gradient"]},
        {"weight": float("nan")},
        {"grad_norm": 2 * NUMBER_ERROR["grad_norm"]},
        {"evaluation": float("nan")},
    ]
    assert passes(good) and format_table({"case": [good]})[1]
    for change in bad:
        assert not passes(good | change)
        table, passed = format_table({"case": [good, good | change]})
        assert not passed and "0 of 1 cases" in table and ("DIFFERENT" in table) == ("drifted" not in change)
    table, passed = format_table({"case": [good], crash_name(2): [{"drifted": [], "crashed": -9}]})
    assert not passed and "CRASHED: exit code -9" in table and "1 of 2 cases" in table
