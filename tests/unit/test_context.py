"""The pieces of context parallelism and of interleaved pipelines that one process can show."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from egmla_megatron.attention.core_attention import TorchCoreAttention
from egmla_megatron.config.check import check_config
from egmla_megatron.data.batch import DataShare, batch_iterator
from egmla_megatron.data.context_shard import context_shard
from egmla_megatron.data.validation import validation_samples
from egmla_megatron.errors import UserError
from egmla_megatron.train.step import _for_each_chunk
from tests.tiny import tiny_model, tiny_run


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_ranks_hold_the_whole_sequence_with_equal_work(size: int) -> None:
    whole = torch.arange(2 * 16).view(2, 16)
    parts = [context_shard(whole, rank, size) for rank in range(size)]
    assert torch.equal(torch.cat(parts, 1).sort(1).values, whole)
    assert {int(part.sum()) for part in parts} == {int(whole.sum()) // size}


class _Data(list):
    config = SimpleNamespace(reset_position_ids=False)


class _Resetting(list):
    config = SimpleNamespace(reset_position_ids=True)


@pytest.mark.parametrize("kind", [_Data, _Resetting])
def test_a_batch_is_cut_after_it_was_read(kind: type[list[Any]]) -> None:
    sample = {name: torch.arange(16) + 100 * i for i, name in enumerate(("tokens", "labels", "loss_mask"))}
    sample["position_ids"] = torch.arange(16) % 5
    share = DataShare(vocab_size=200, cp_rank=1, cp_size=2)
    cut = next(batch_iterator(kind([sample]), [{0: [0]}], torch.device("cpu"), num_workers=0, share=share))
    chosen = [4, 5, 6, 7, 8, 9, 10, 11]
    assert cut.tokens_BS[0].tolist() == chosen
    assert cut.labels_BS[0].tolist() == [100 + i for i in chosen]
    assert cut.loss_mask_BS[0].tolist() == [200 + i for i in chosen]
    assert cut.position_ids_BS[0].tolist() == [i % 5 if kind is _Resetting else i for i in chosen]


def core(backend: str) -> TorchCoreAttention:
    config = SimpleNamespace(
        attention_dropout=0.0, sdpa_backend=backend, sequence_parallel=False, context_parallel_size=1
    )
    return TorchCoreAttention(config, 1, AttnMaskType.causal, "self")


@pytest.mark.parametrize("backend", ["math", "flash"])
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_the_last_queries_alone_see_what_they_see_among_all(backend: str, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(8, 2, 3, 4, generator=generator, requires_grad=True) for _ in range(3))

    def gradients(out: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(out[-rows:].square().sum(), (q, k, v)))

    whole, last = core(backend)(q, k, v, None), core(backend)(q[-rows:], k, v, None)
    torch.testing.assert_close(last, whole[-rows:], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradients(last), gradients(whole), rtol=1e-5, atol=1e-6)


def test_every_chunk_reads_the_same_batches_whoever_asks_first() -> None:
    read: list[int] = []

    def numbers() -> Iterator[Any]:
        for number in range(100):
            read.append(number)
            yield number

    first, second, third = _for_each_chunk(numbers(), 3)
    assert [next(first), next(first)] == [0, 1]
    assert [next(third), next(second), next(second), next(second)] == [0, 0, 1, 2]
    assert read == [0, 1, 2]  # nothing before it is asked for
    assert [next(first), next(third), next(third)] == [2, 1, 2]


def test_an_interleaved_evaluation_takes_one_micro_batch_per_stage_at_a_time() -> None:
    cfg = tiny_run(tiny_model(num_layers=4), parallel={"pipeline": 2, "virtual_pipeline": 2})
    layout = check_config(cfg, 2)
    assert validation_samples(cfg, layout, 7) == 4
    with pytest.raises(UserError, match=r"allowed at least 4 .*stages of an interleaved pipeline"):
        validation_samples(cfg, layout, 3)
