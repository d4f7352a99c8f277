"""The estimate of a step's time against every step that was measured on GPUs, and its parts by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from egmla_megatron.config.check import check_config
from egmla_megatron.config.load import load_config
from egmla_megatron.report.cards import LINK_EFFICIENCY, Card, Cluster, find_card, find_cluster
from egmla_megatron.report.step_time import (
    StepTime,
    estimate_error,
    estimate_step,
    link_seconds,
    missing_for_estimate,
)
from egmla_megatron.report.traffic import Collective
from tests.recorded_steps import RecordedStep, recorded_steps

H200 = find_card("h200", None, None)
MEAN = {"graph": 0.02, "eager": 0.07}


def estimated(step: RecordedStep) -> StepTime:
    """With the link as it was measured."""
    card, cluster = machine(step)
    return estimate_step(step.cfg, check_config(step.cfg, step.ranks), card, cluster, te=step.te, triton=step.triton)


def machine(step: RecordedStep) -> tuple[Card, Cluster]:
    inside = None if step.one_gpu_nodes else step.link_gb_per_s
    between = step.link_gb_per_s if step.one_gpu_nodes else None
    card = find_card(step.card, None, None)
    return card, find_cluster(card, step.ranks, 1 if step.one_gpu_nodes else None, inside, between)


def test_every_measured_step(root: Path) -> None:
    errors: dict[str, list[float]] = {"graph": [], "eager": [], "slower kernels": []}
    present = 0
    for step in recorded_steps(root):
        found = estimated(step)
        error = (found.step_s * 1e3 + step.also_ms) / step.step_ms - 1
        how = "graph" if step.cfg.train.cuda_graph else "eager"
        errors[how if step.comparable else "slower kernels"].append(error)
        present += step.present
        print(f"{error:+6.1%} of {step.step_ms:6.1f} ms, {found.limited_by}, {how}, {step.comparable}: {step.name}")
        said = estimate_error(step.cfg)
        if not step.comparable:
            assert -0.32 < error < 0.02, step.name  # these took longer
            continue
        assert abs(error) < said + 0.005, step.name  # as the plan says it, in whole percents
        if step.one_gpu_nodes:
            assert found.limited_by == "network"
        elif how == "eager" and ("Base" in step.name or "pretrain_base" in step.name):
            assert found.limited_by == "host launches"
    print({how: (len(some), min(some), max(some), fmean(map(abs, some)), fmean(some)) for how, some in errors.items()})
    assert present == 12
    assert [len(errors[how]) for how in ("graph", "eager", "slower kernels")] == [19 + present, 39, 37]
    assert max(map(abs, errors["graph"])) < 0.055  # the plan's 6%
    for how, mean in MEAN.items():
        assert fmean(map(abs, errors[how])) < mean
        assert abs(fmean(errors[how])) < 0.02  # neither too fast nor too slow on the whole


def test_links() -> None:
    cluster = Cluster(gpus_per_node=4, gpu_gb_per_s=100.0, node_gb_per_s=10.0, gpu_origin="", node_origin="")
    gb = 1e9

    def seconds(kind: str, ranks: int, stride: int) -> float:
        return link_seconds(Collective("", kind, ranks, stride, gb), cluster)

    assert seconds("all_reduce", 4, 1) == 0.01  # within a node
    assert seconds("all_reduce", 2, 2) == 0.01
    assert seconds("all_reduce", 8, 1) == 0.1  # one ring leaves every node once
    assert seconds("all_reduce", 2, 4) == 0.4  # four rings at once, one for each GPU
    assert seconds("all_reduce", 4, 2) == 0.2
    assert seconds("all_to_all", 8, 1) == pytest.approx(0.1 * 4 * 4 / 7)  # to 4 of 7 others by the node's link
    assert seconds("send", 2, 4) == 0.4


def test_cards_and_links_from_the_sheets_or_as_given() -> None:
    sheet = find_cluster(H200, 16, None, None, None)
    assert (sheet.gpus_per_node, sheet.gpu_gb_per_s, sheet.node_gb_per_s) == (
        8,
        450 * LINK_EFFICIENCY,
        400 * LINK_EFFICIENCY,
    )
    assert find_cluster(H200, 16, 4, None, None).node_gb_per_s == 200 * LINK_EFFICIENCY
    given = find_cluster(H200, 16, 4, 11.0, 7.0)
    assert (given.gpus_per_node, given.gpu_gb_per_s, given.node_gb_per_s) == (4, 11.0, 7.0)
    assert given.gpu_origin == "as given" != sheet.gpu_origin
    assert find_cluster(H200, 2, None, None, None).gpus_per_node == 2


def test_nothing_is_estimated_without_its_numbers() -> None:
    cfg = load_config("pretrain_base", ["train.global_batch_size=16"])
    layout = check_config(cfg, 2)
    other = find_card("mine", 80.0, 500.0)
    assert missing_for_estimate(cfg, layout, other, find_cluster(other, 2, None, None, None)) is not None
    other = find_card("mine", 80.0, 500.0, 3000.0)
    unlinked = find_cluster(other, 2, None, None, None)
    assert missing_for_estimate(cfg, layout, other, unlinked) == "give --nvlink-gb-per-s"
    apart = find_cluster(other, 2, 1, None, None)
    assert missing_for_estimate(cfg, layout, other, apart) == "give --link-gb-per-s"
    with pytest.raises(ValueError, match="--link-gb-per-s"):
        estimate_step(cfg, layout, other, apart, te=True, triton=True)
    assert missing_for_estimate(cfg, layout, other, find_cluster(other, 2, 1, None, 3.0)) is None


def test_what_makes_a_step_longer() -> None:
    cfg = load_config("pretrain_1b2", ["train.cuda_graph=true"])

    def step(ranks: int = 8, **sections: dict[str, object]) -> StepTime:
        changed = replace(cfg, **{name: replace(getattr(cfg, name), **keys) for name, keys in sections.items()})  # type: ignore[arg-type]
        cluster = find_cluster(H200, ranks, None, None, None)
        return estimate_step(changed, check_config(changed, ranks), H200, cluster, te=True, triton=True)

    base = step()
    whole: dict[str, dict[str, object]] = {
        "optimizer": {"distributed": False},
        "parallel": {"overlap_param_gather": False},
    }
    once = step(ranks=1, **whole, train={"global_batch_size": 48})
    eighth = step(**whole)  # as much work for every rank, updates too
    assert eighth.memory_s == pytest.approx(once.memory_s)  # collectives divide
    assert base.limited_by == "matrix arithmetic" and base.bubble_s == 0
    assert base.step_s > base.matrix_s > 0 and base.overlap_s == base.host_s > 0  # the next step is launched meanwhile
    waiting = step(optimizer={"fused_master_weights": False})
    assert waiting.overlap_s == 0 and waiting.step_s > base.step_s + waiting.host_s
    small = step(train={"global_batch_size": 8, "micro_batch_size": 1}, model={"num_layers": 1, "hidden_size": 256})
    assert small.limited_by == "host launches" and small.step_s == small.host_s
    again = step(train={"recompute": "full", "cuda_graph": False})
    assert again.matrix_s == pytest.approx(base.matrix_s * 4 / 3, rel=0.04)  # the head is not computed again
    stages = step(parallel={"pipeline": 8}, train={"cuda_graph": False, "global_batch_size": 8})
    assert stages.limited_by == "pipeline bubble"
    assert step(ranks=16).step_s < 0.55 * base.step_s
    slow_host = step(train={"cuda_graph": False})
    assert slow_host.overlap_s > 0
    for each in (base, waiting, small, again, stages, slow_host):  # what the plan shows adds up
        parts = each.matrix_s + each.memory_s + each.small_kernels_s + each.host_s + each.network_exposed_s
        assert parts + each.bubble_s - each.overlap_s == pytest.approx(each.step_s)
