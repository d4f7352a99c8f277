"""The benchmark end to end on two gloo ranks, on one network and on two of its own making."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from egmla_megatron.bench.network import check_machine_for_networks
from egmla_megatron.bench.variants import VARIANTS
from egmla_megatron.errors import UserError
from tests.bench import KEYS
from tests.dist.harness import Job, start

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]
TOOL = "tools/bench_sharding.py"
# The tables dominate as in the paper's model, and a step takes a few hundredths of a second.
SMALL = (
    "--config=bench_nodes --sequences=1 --steps=2 --warmup=1 model.num_layers=2 model.vocab_size=2048 "
    "model.hidden_size=48 model.intermediate_size=64 optimizer.lr=1e-3"
).split()
TOLERANCE = 0.05  # what the prediction leaves out: padding of rows, the loss, the gradient norm


def measure(ranks: int, folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    """(the JSON result, all output)."""
    path = folder / "result.json"
    command = [TOOL, *SMALL, f"--json={path}", *options]
    output = start(ranks, command, folder / "log", warm=ranks > 1).succeed()  # one rank makes networks for others
    return json.loads(path.read_text()), output


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """Two rounds of all variants: one start for all tests."""
    folder = tmp_path_factory.mktemp("bench")
    return measure(2, folder, "--rounds=2", f"--markdown={folder / 'table.md'}", f"--plot={folder / 'figure.svg'}")


def test_every_variant_gives_a_finite_row(result: tuple[dict[str, Any], str]) -> None:
    found, output = result
    assert {"hardware", "software", "commit", "settings", "link", "rows"} <= set(found)
    assert [row["variant"] for row in found["rows"]] == list(VARIANTS)
    for row in found["rows"]:
        assert tuple(row)[: len(KEYS)] == KEYS
        numbers = [row[key] for key in KEYS if key not in ("variant", "peak_mib")]
        assert all(isinstance(each, int | float) and math.isfinite(each) and each >= 0 for each in numbers), row
        assert row["peak_mib"] is None  # a CPU has no such number
        assert (row["n"], row["gate_world"]) == (4, 2)
        assert row["step_ms_p10"] <= row["step_ms_median"] <= row["step_ms_p90"]
        assert (row["exchange_ms"] > 0) == (row["gate_group"] == 2)
        assert row["variant"] in output
    assert found["link"]["gb_per_s"] > 0 and 0 < found["settings"]["unique_fraction"] < 1


def test_every_variant_is_the_same_training(result: tuple[dict[str, Any], str]) -> None:
    rows = result[0]["rows"]
    for row in rows[1:]:
        for key in ("loss_first", "loss_last"):
            assert row[key] == pytest.approx(rows[0][key], abs=1e-5)
    assert rows[0]["loss_last"] != rows[0]["loss_first"]


def test_counted_bytes_are_those_predicted(result: tuple[dict[str, Any], str]) -> None:
    rows = {row["variant"]: row for row in result[0]["rows"]}
    for row in rows.values():
        assert row["bytes_sent_per_rank"] == pytest.approx(row["bytes_predicted_per_rank"], rel=TOLERANCE)
    sent = {name: row["bytes_sent_per_rank"] for name, row in rows.items()}
    assert sent["vanilla"] == sent["vanilla_unique"]
    assert sent["dimension_wise_all_to_all"] < sent["dimension_wise_all_to_all_no_unique"] < sent["vanilla"]
    assert sent["dimension_wise_all_gather"] < sent["dimension_wise_all_gather_no_unique"] < sent["vanilla"]
    for name in ("dimension_wise_all_to_all", "dimension_wise_all_to_all_no_unique"):
        exchanged = rows[name]["bytes_by_collective"]["alltoall_base_"]  # no other collective is of that kind
        assert exchanged == pytest.approx(rows[name]["bytes_predicted_exchange"], rel=0.12)  # padding of rows
    tokens, layers, width = 128, 2, 4 * 64  # bytes of a row and layer; half of every row comes from the other rank
    assert rows["dimension_wise_all_to_all_no_unique"]["bytes_predicted_exchange"] == 2 * tokens * layers * width / 2
    per_layer = rows["dimension_wise_all_to_all_per_layer"]
    assert per_layer["bytes_sent_per_rank"] == sent["dimension_wise_all_to_all"]
    assert per_layer["collectives"]["alltoall_base_"] == 4  # two layers, there and back


@pytest.mark.parametrize("overlap", ["--overlap", "--no-overlap"])
def test_distributed_optimizer_in_bf16(tmp_path: Path, overlap: str) -> None:
    options = ["--distributed-optimizer", "--gradients=bf16", "train.precision=bf16", overlap]
    found, _ = measure(2, tmp_path, "--variants=vanilla,dimension_wise_all_to_all", *options)
    for row in found["rows"]:
        assert row["bytes_sent_per_rank"] == pytest.approx(row["bytes_predicted_per_rank"], rel=TOLERANCE)
        assert {"_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"} & set(row["collectives"])


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    job = start(1, [TOOL, "--steps=none"], tmp_path / "log")
    assert job.wait() == 2
    assert job.output.startswith("error: command line") and len(job.output.splitlines()) == 1


@pytest.fixture
def networks() -> None:
    """Skips, with the reason, where this machine cannot make networks."""
    from egmla_megatron.bench.network import open_network

    try:
        check_machine_for_networks()
        with open_network(2, "1gbit"):
            pass
    except UserError as error:
        pytest.skip(str(error))


def interfaces() -> set[str]:
    return set(os.listdir("/sys/class/net"))


@pytest.mark.usefixtures("networks")
def test_nodes_on_this_machine(tmp_path: Path) -> None:
    before = interfaces()
    options = ["--nodes-on-this-machine=2", "--link=400mbit", "--variants=vanilla,dimension_wise_all_to_all"]
    found, _ = measure(1, tmp_path, *options)
    vanilla, ours = found["rows"]
    assert ours["wire_bytes_per_rank"] < vanilla["wire_bytes_per_rank"]
    for row in found["rows"]:  # headers and acknowledgements on top of what was counted
        assert row["bytes_sent_per_rank"] < row["wire_bytes_per_rank"] < 1.25 * row["bytes_sent_per_rank"]
    assert found["link"]["gb_per_s"] < 0.06  # the cap, 0.05 GB/s, and its bucket
    assert found["settings"]["link_cap"] == "400mbit"
    assert interfaces() == before


def started(folder: Path) -> tuple[Job, list[psutil.Process], list[psutil.Process]]:
    """(a job whose ranks are connected, the ranks, everything that it started)."""
    options = ["--nodes-on-this-machine=2", "--variants=vanilla", "--steps=100000"]
    job = start(1, [TOOL, *SMALL, *options], folder / "log")
    job.wait_for("link:")
    deadline = time.monotonic() + 20
    while True:
        children = psutil.Process(job.process.pid).children(recursive=True)
        lines = [_command_line(each) for each in children]
        ranks = [each for each, line in zip(children, lines, strict=True) if "bench_sharding" in line]
        others = [line for line in lines if "multiprocessing.resource_tracker" not in line]  # one a rank, or none yet
        if len(ranks) == 2 and len(others) == 5:  # and what holds the networks of two nodes and a switch
            return job, ranks, children
        if time.monotonic() > deadline:  # a command that a rank is just starting is one more for a moment
            job.kill()
            pytest.fail(f"{len(ranks)} ranks, {len(children)} children: {lines}")
        time.sleep(0.1)


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def all_gone(processes: list[psutil.Process]) -> bool:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.usefixtures("networks")
@pytest.mark.parametrize("way", ["a rank is killed", "Ctrl-C", "kill", "kill -9"])
def test_nothing_is_left_behind(tmp_path: Path, way: str) -> None:
    job, ranks, children = started(tmp_path)
    expected = {"a rank is killed": 1, "Ctrl-C": 130, "kill": 128 + signal.SIGTERM, "kill -9": -signal.SIGKILL}
    if way == "a rank is killed":
        ranks[1].kill()
    else:
        number = {"Ctrl-C": signal.SIGINT, "kill": signal.SIGTERM, "kill -9": signal.SIGKILL}[way]
        os.kill(job.process.pid, number)
    assert job.wait() == expected[way], job.output
    assert all_gone(children)
    if way == "a rank is killed":
        assert "was killed by SIGKILL" in job.output.splitlines()[-1]
