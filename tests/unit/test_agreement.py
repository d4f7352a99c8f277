"""Ranks that were started with different configurations say so, all of them, before any collective."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.distributed import HashStore

from egmla_megatron.config.schema import RunConfig
from egmla_megatron.errors import UserError
from egmla_megatron.parallel.agreement import agree_on, agree_on_config
from tests.tiny import tiny_run


def verdicts(*configs: RunConfig) -> list[str]:
    """What each rank is told: empty for agreement."""
    store = HashStore()

    def rank(number: int) -> str:
        try:
            agree_on_config(store, number, len(configs), configs[number])
        except UserError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(configs)) as pool:
        return list(pool.map(rank, range(len(configs))))


def test_equal_configurations_agree_whatever_a_node_sets_for_itself() -> None:
    own: dict[str, Any] = {"cache_dir": "/tmp/node", "num_workers": 3}
    assert verdicts(tiny_run(), tiny_run(data=own), tiny_run()) == ["", "", ""]
    assert verdicts(tiny_run()) == [""]


def test_a_difference_is_named_on_every_rank() -> None:
    told = verdicts(tiny_run(), tiny_run(), tiny_run(optimizer={"lr": 0.5}))
    assert len(set(told)) == 1
    assert "ranks 0 and 2 differ: optimizer.lr 0.01 and 0.5" in told[0] and "same file and overrides" in told[0]


def test_other_facts_than_a_configuration() -> None:
    store = HashStore()

    def rank(number: int) -> str:
        try:
            agree_on(store, number, 2, "command line", {"rounds": number + 1, "steps": 3}, "start both alike")
        except UserError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(rank, range(2)))
    assert told == ["command line: ranks 0 and 1 differ: rounds 1 and 2; start both alike"] * 2
