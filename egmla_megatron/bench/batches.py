"""The micro-batches that every variant trains on: the same ones, through the trainer's own loader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from egmla_megatron.bench import zipf
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.data.batch import Batch, batch_iterator
from egmla_megatron.data.dataset import build_datasets, micro_batch_indices
from egmla_megatron.parallel.world import World
from egmla_megatron.train.setup import data_share

__all__ = ["InMemoryDataset", "Rows", "micro_batches", "open_dataset", "rows_of_step"]

_LONGEST = 64  # global batches of synthetic text; longer measurements read them again, in another order


class InMemoryDataset(torch.utils.data.Dataset):
    """Ids [N, S+1] with the interface of megatron-core's GPT dataset, as far as a training batch needs it."""

    def __init__(self, ids_NS: Tensor) -> None:
        self.ids_NS = ids_NS
        self.mask_S = torch.ones(ids_NS.shape[1] - 1)
        self.config = SimpleNamespace(reset_position_ids=False)

    def __len__(self) -> int:
        return len(self.ids_NS)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.ids_NS[index]
        return {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": self.mask_S}


@dataclass(frozen=True)
class Rows:
    """Token ids of one step, summed over its micro-batches: what the exchange has to bring home."""

    tokens: int  # of one rank
    own: int  # distinct ids of one rank, the most of any rank: exchanges pad to it
    union: int  # distinct ids of all ranks together
    unique_fraction: float  # distinct ids of a rank's micro-batch / its tokens, mean over ranks


def open_dataset(cfg: RunConfig, steps: int) -> Any:
    """The text of `cfg.data.train` where it names some, else synthetic ids for `steps` steps, equal on all ranks."""
    if cfg.data.train:
        return build_datasets(cfg).train
    samples = min(steps, _LONGEST) * cfg.train.global_batch_size
    ids = zipf.draw((samples, cfg.train.seq_length + 1), cfg.model.vocab_size, cfg.run.seed)
    return InMemoryDataset(torch.from_numpy(ids))


def _chosen(
    cfg: RunConfig, dataset: Any, dp_ranks: Sequence[int], dp_size: int, step: int = 0
) -> Iterator[dict[int, list[int]]]:
    first, micro_batch = step * cfg.train.global_batch_size, cfg.train.micro_batch_size
    return micro_batch_indices(first, None, len(dataset), micro_batch=micro_batch, dp_ranks=dp_ranks, dp_size=dp_size)


def micro_batches(cfg: RunConfig, world: World, dataset: Any) -> Iterator[Batch]:
    """This rank's micro-batches from the first step on, endless. The one place that makes batches."""
    share = data_share(cfg, world)
    chosen = _chosen(cfg, dataset, share.dp_ranks, world.layout.dp)
    return batch_iterator(dataset, chosen, world.device, num_workers=cfg.data.num_workers, share=share)


def rows_of_step(cfg: RunConfig, dataset: Any, ranks: int, step: int) -> Rows:
    """Counted on the host from the data alone, for all of `ranks` data-parallel ranks."""
    stream = _chosen(cfg, dataset, range(ranks), ranks, step)
    own, union, fractions = 0, 0, []
    rounds = cfg.train.global_batch_size // (cfg.train.micro_batch_size * ranks)
    for _ in range(rounds):
        ids = [torch.stack([dataset[i]["tokens"] for i in numbers]).flatten() for numbers in next(stream).values()]
        distinct = [each.unique() for each in ids]
        own += max(map(len, distinct))
        union += len(torch.cat(distinct).unique())
        fractions += [len(some) / len(all_) for some, all_ in zip(distinct, ids, strict=True)]
    tokens = rounds * cfg.train.micro_batch_size * cfg.train.seq_length
    return Rows(tokens, own, union, sum(fractions) / len(fractions))
