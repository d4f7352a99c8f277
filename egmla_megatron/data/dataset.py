"""Training and validation samples from megatron-core's indexed datasets, in an order that never depends on
how long the run is, how many ranks read it, or how often it was resumed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from egmla_megatron.config.load import dump_yaml
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.data.blend import parse_blend, resolve_eod
from egmla_megatron.data.index_cache import cache_key, helper_command, index_folder
from egmla_megatron.data.tokenizer import TokenIds
from egmla_megatron.errors import UserError

__all__ = ["Datasets", "build_datasets", "build_split", "build_validation", "epoch_index", "micro_batch_indices"]


@dataclass(frozen=True)
class Datasets:
    """The two splits and what identifies them."""

    train: Any  # indexable: i -> {"tokens", "labels", "loss_mask", ...} of seq_length
    valid: Any | None
    fingerprint: str  # changes when the samples or their order would; checkpoints carry it


_KEYS = ("data.train", "data.valid")


def _dataset_config(cfg: RunConfig, split: int, eod: int, cache: Path) -> GPTDatasetConfig:
    blends: list[Any] = [None, None, None]
    blends[split] = parse_blend(_entries(cfg, split), _KEYS[split])
    return GPTDatasetConfig(
        random_seed=cfg.run.seed,
        sequence_length=cfg.train.seq_length,
        blend_per_split=blends,
        path_to_cache=str(cache),
        tokenizer=TokenIds(eod, cfg.model.vocab_size),
        reset_position_ids=cfg.data.reset_position_ids,
        reset_attention_mask=False,  # check_document_options: the model could not honour it
        eod_mask_loss=cfg.data.eod_mask_loss,
        create_attention_mask=False,
    )


def _entries(cfg: RunConfig, split: int) -> Sequence[str]:
    return (cfg.data.train, cfg.data.valid)[split]


def _wanted(cfg: RunConfig, split: int) -> int | None:
    """Samples to draw: with weights those of the whole run or of one evaluation, else every sample once (None)."""
    _, weights = parse_blend(_entries(cfg, split), _KEYS[split])
    if weights is None:
        return None
    return (cfg.total_steps, cfg.train.eval_batches)[split] * cfg.train.global_batch_size


def build_split(cfg: RunConfig, split: int, cache: Path) -> Any:
    """The dataset of a split (0 train, 1 validation), its indices read from or written to the folder `cache`.

    Raises:
        UserError: less than one sample.
    """
    config = _dataset_config(cfg, split, resolve_eod(cfg), cache)
    sizes: list[int | None] = [0, 0, 0]
    sizes[split] = _wanted(cfg, split)
    dataset = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[split]
    if dataset is None or len(dataset) == 0:
        raise UserError(
            f"{_KEYS[split]}: got {list(_entries(cfg, split))} with less than one sample of "
            f"{cfg.train.seq_length} tokens; use more data or a smaller train.seq_length"
        )
    return dataset


def _build(cfg: RunConfig, split: int) -> Any:
    """The same through the index cache; called by every rank."""
    prefixes, weights = parse_blend(_entries(cfg, split), _KEYS[split])
    facts = [weights, split, _wanted(cfg, split), cfg.run.seed, cfg.train.seq_length, resolve_eod(cfg)]
    base = Path(cfg.data.cache_dir or Path(cfg.run.dir) / "data_cache")

    def alone(folder: Path) -> list[str]:
        return helper_command("egmla_megatron.data.build_indices", dump_yaml(cfg), str(split), str(folder))

    with index_folder(base, cache_key(prefixes, [*facts, cfg.model.vocab_size]), alone) as folder:
        return build_split(cfg, split, folder)


def build_datasets(cfg: RunConfig) -> Datasets:
    """Build both splits; megatron-core caches the sample indices, rank 0 first. Called by every rank.

    Without weights a dataset holds every sample of one epoch once, and `epoch_index` orders further epochs,
    so extending a run keeps its order. With weights megatron-core draws exactly the run's samples (validation: those of
    one evaluation).

    Raises:
        UserError: too little data, a cache that cannot be written.
    """
    train = _build(cfg, 0)
    valid = build_validation(cfg) if cfg.data.valid else None
    names = list(map(_stem, cfg.data.train))
    contents = [_content(prefix) for prefix in parse_blend(cfg.data.train, _KEYS[0])[0]]
    facts = [names, cfg.train.seq_length, cfg.run.seed, len(train), _wanted(cfg, 0), resolve_eod(cfg), contents]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return Datasets(train, valid, digest)


def build_validation(cfg: RunConfig) -> Any:
    """The validation split alone. Called by every rank."""
    return _build(cfg, 1)


def _stem(entry: str) -> str:
    """Only the file name counts: the same data may be mounted elsewhere after a move."""
    return Path(entry).name


def _content(prefix: str) -> dict[str, str] | None:
    """Checksums of a data set as its manifest has them; None without a manifest, where only the sizes tell."""
    path = Path(f"{prefix}.json")
    if not path.is_file():
        return None
    sums: dict[str, str] | None = json.loads(path.read_text(encoding="utf-8")).get("sha256")
    return sums


def epoch_index(position: int, size: int) -> int:
    """Sample to read at a position of the endless training order.

    The dataset is already shuffled; the first epoch reads it in order, epoch e through the affine
    permutation i -> a_e * i + b_e (mod size), which needs no memory at any size.
    """
    epoch, index = divmod(position, size)
    if epoch == 0:
        return index
    digest = hashlib.sha256(f"epoch {epoch}".encode()).digest()
    factor = int.from_bytes(digest[:8], "big") % size or 1
    while math.gcd(factor, size) != 1:
        factor += 1
    return (factor * index + int.from_bytes(digest[8:16], "big")) % size


def micro_batch_indices(
    start: int, stop: int | None, size: int, *, micro_batch: int, dp_ranks: Sequence[int], dp_size: int
) -> Iterator[dict[int, list[int]]]:
    """Sample indices of the micro-batches of some data-parallel ranks, from position `start` to `stop` (None: endless).

    Positions go to micro-batches first and ranks second, so the global batch is the same set of samples for
    every number of ranks. `stop - start` must be a multiple of micro_batch * dp_size.
    """
    position = start
    while stop is None or position < stop:
        firsts = {rank: position + rank * micro_batch for rank in dp_ranks}
        yield {rank: [epoch_index(first + i, size) for i in range(micro_batch)] for rank, first in firsts.items()}
        position += micro_batch * dp_size
