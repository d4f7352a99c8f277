"""The benchmark's formulas: bytes of collectives, bytes of a step, distinct ids, rows from measurements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from egmla_megatron.bench import zipf
from egmla_megatron.bench.batches import InMemoryDataset, open_dataset, rows_of_step
from egmla_megatron.bench.link import interface_in_use, sent_by_interface
from egmla_megatron.bench.measure import Measurement
from egmla_megatron.bench.options import base_config, parse_options
from egmla_megatron.bench.predict import Traffic, exchanged_rows, predict_traffic
from egmla_megatron.bench.probe import ExchangeTimes
from egmla_megatron.bench.ring import ring_bytes
from egmla_megatron.bench.rows import Facts, make_row, percentile
from egmla_megatron.bench.variants import VARIANTS, variant_config
from egmla_megatron.config.schema import RunConfig
from tests.bench import KEYS

GPT2_IDS = 50257


def base(words: str = "", ranks: int = 4) -> RunConfig:
    return base_config(parse_options(words.split()), ranks, cuda=True, steps=9)


def variant(name: str, cfg: RunConfig, ranks: int = 4) -> RunConfig:
    return variant_config(cfg, VARIANTS[name], ranks)


@pytest.mark.parametrize(("tokens", "distinct"), zipf.MEASURED.items())
def test_synthetic_ids_repeat_like_english(tokens: int, distinct: int) -> None:
    assert zipf.distinct_ids(tokens, GPT2_IDS) == pytest.approx(distinct, rel=0.03)


def test_drawn_ids_follow_the_law() -> None:
    ids = zipf.draw((4, 8192), GPT2_IDS, seed=3)
    assert ids.min() >= 0 and ids.max() < GPT2_IDS
    assert np.mean([len(np.unique(row)) for row in ids]) == pytest.approx(zipf.MEASURED[8192], rel=0.06)
    assert (zipf.draw((9,), 50, seed=1) == zipf.draw((9,), 50, seed=1)).all()


def test_ring_formulas() -> None:
    assert ring_bytes("allreduce_coalesced_", 100, 4) == 150
    assert ring_bytes("_allgather_base_", 100, 4) == 300
    assert ring_bytes("_reduce_scatter_base_", 100, 4) == ring_bytes("alltoall_base_", 100, 4) == 75
    assert ring_bytes("allreduce_", 100, 1) == ring_bytes("_allgather_base_", 100, 1) == 0
    with pytest.raises(ValueError, match="no formula"):
        ring_bytes("something_new_", 100, 4)


def test_replicated_tables_send_all_gradients() -> None:
    """120.1M and 154.5M parameters of EG-MLA-Base in fp32, 2 * 3/4 of them with 4 ranks."""
    traffic = predict_traffic(variant("vanilla", base()), 4, 0)
    assert traffic.dense == pytest.approx(120.1e6 * 4 * 1.5, rel=1e-3)
    assert traffic.tables == pytest.approx(154.5e6 * 4 * 1.5, rel=1e-3)
    assert traffic.exchange == 0 and traffic.total == traffic.dense + traffic.tables


def test_sharded_tables_send_rows() -> None:
    cfg = variant("dimension_wise_all_to_all", base())
    traffic = predict_traffic(cfg, 4, 1720)
    assert traffic.tables == 0
    assert traffic.exchange == 2 * 1720 * 12 * 256 * 2 * 3 / 4  # rows, layers, columns, bytes; there and back


def test_rows_of_each_exchange() -> None:
    counts: dict[str, Any] = {"tokens": 8192, "own": 1720, "union": 4882}
    rows = {name: exchanged_rows(variant(name, base()), **counts) for name in VARIANTS if name.startswith("dim")}
    assert rows == {
        "dimension_wise_all_to_all": 1720,
        "dimension_wise_all_to_all_no_unique": 8192,
        "dimension_wise_all_gather": 4882,
        "dimension_wise_all_gather_no_unique": 4 * 8192,
        "dimension_wise_all_to_all_per_layer": 1720,
    }


def test_gradient_type_and_distributed_optimizer_change_the_bytes() -> None:
    full = predict_traffic(variant("vanilla", base()), 4, 0).total
    half = predict_traffic(variant("vanilla", base("--gradients bf16")), 4, 0).total
    sharded = predict_traffic(variant("vanilla", base("--distributed-optimizer")), 4, 0).total
    twice = predict_traffic(variant("vanilla", base("--distributed-optimizer --no-overlap")), 4, 0).total
    assert half == full / 2
    assert sharded == pytest.approx(full * (4 + 2) / (4 + 4))  # gradients scattered in fp32, weights gathered in bf16
    assert twice == pytest.approx(full * (4 + 2 + 2) / (4 + 4))  # see predict._reduced


def test_rows_are_counted_over_all_ranks() -> None:
    import torch

    cfg = base("--config bench_nodes --sequences 1", ranks=2)
    cfg = replace(cfg, train=replace(cfg.train, seq_length=4))
    ids = [[0, 1, 1, 2, 9], [3, 3, 3, 0, 9], [5, 5, 5, 5, 9], [6, 7, 6, 7, 9]]
    dataset = InMemoryDataset(torch.tensor(ids))
    first, second = (rows_of_step(cfg, dataset, 2, step) for step in (0, 1))
    assert (first.tokens, first.own, first.union, first.unique_fraction) == (4, 3, 4, (3 / 4 + 2 / 4) / 2)
    assert (second.own, second.union) == (2, 3)
    assert dataset[0]["labels"].tolist() == [1, 1, 2, 9] and dataset[0]["loss_mask"].sum() == 4


def test_synthetic_text_is_as_long_as_needed() -> None:
    cfg = base("--config bench_nodes --sequences 2", ranks=2)
    assert len(open_dataset(cfg, 5)) == 5 * 4
    assert len(open_dataset(cfg, 10**6)) == 64 * 4


def test_percentiles() -> None:
    assert percentile([3.0], 0.9) == 3
    assert [percentile([4.0, 1.0, 2.0, 3.0, 5.0], share) for share in (0, 0.1, 0.5, 1)] == [1, 1.4, 3, 5]


def measurement(step_ms: list[float], peak: float | None, **changes: Any) -> Measurement:
    values: dict[str, Any] = {
        "step_ms": step_ms,
        "losses": [9.0, 8.0],
        "peak_mib": peak,
        "peak_rss_mib": 100.0,
        "sent_bytes": 10.0,
        "collectives": {},
        "sent_by_collective": {},
        "wire_bytes": 12.0,
        "exchange": [ExchangeTimes(3.0, 1.0), ExchangeTimes(5.0, 2.0)],
    }
    return Measurement(**(values | changes))


def facts(name: str) -> Facts:
    return Facts(VARIANTS[name], 2, 1000, 3.1, Traffic(1.0, 0.0, 2.0), 7, 0.21)


def test_a_row_is_made_of_the_slowest_rank_of_every_step() -> None:
    first = [measurement([10.0, 30.0], 5.0), measurement([20.0, 10.0], 6.0, sent_bytes=11.0)]
    second = [measurement([40.0, 40.0], 4.0), measurement([40.0, 50.0], None)]
    row = make_row(facts("dimension_wise_all_to_all"), [first, second])
    assert tuple(row)[: len(KEYS)] == KEYS
    assert (row["n"], row["step_ms_median"], row["tokens_per_second"]) == (4, 35.0, 1000 / 35.0 * 1e3)
    assert row["step_ms_median_of_rounds"] == [25.0, 45.0]
    assert row["peak_mib"] is None  # one rank does not know it
    assert (row["exchange_ms"], row["exposed_ms"]) == (4.0, 1.5)
    assert (row["bytes_sent_per_rank"], row["bytes_predicted_per_rank"], row["wire_bytes_per_rank"]) == (11, 3, 12)
    vanilla = make_row(facts("vanilla"), [[measurement([1.0], 2.0, exchange=[]), measurement([1.0], 3.0, exchange=[])]])
    assert (vanilla["exchange_ms"], vanilla["exposed_ms"], vanilla["peak_mib"]) == (0.0, 0.0, 3.0)


def test_the_interface_is_known_where_the_environment_fixes_it() -> None:
    assert interface_in_use("gloo", {"GLOO_SOCKET_IFNAME": "eth0"}) == "eth0"
    assert interface_in_use("nccl", {"NCCL_SOCKET_IFNAME": "=lo", "NCCL_NET": "Socket"}) == "lo"
    assert interface_in_use("nccl", {"NCCL_SOCKET_IFNAME": "lo"}) is None  # the bytes may go by InfiniBand
    assert interface_in_use("gloo", {}) is None
    assert sent_by_interface(None) is None and sent_by_interface("no-such-interface") is None
