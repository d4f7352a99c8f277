"""The order of the training data: complete in every epoch, the same for any number of ranks, kept over a resume."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from egmla_megatron.config.load import load_config
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.data.blend import parse_blend, resolve_eod, tokenizer_sha256
from egmla_megatron.data.dataset import build_datasets, epoch_index, micro_batch_indices
from egmla_megatron.errors import UserError
from tests.tiny import write_dataset, write_run


@pytest.mark.parametrize(
    ("entries", "prefixes", "weights"),
    [
        ([], [], None),
        (["a"], ["a"], None),
        (["a", "b"], ["a", "b"], None),
        (["0.3", "a", "2", "b"], ["a", "b"], [0.3, 2.0]),
        (["1", "a"], ["a"], [1.0]),
    ],
)
def test_blend(entries: list[str], prefixes: list[str], weights: list[float] | None) -> None:
    assert parse_blend(entries, "data.train") == (prefixes, weights)


@pytest.mark.parametrize(
    "entries",
    [["0.3"], ["0.3", "a", "b"], ["0", "a"], ["-1", "a"], ["nan", "a"], ["inf", "a"], ["a", "1"], ["1", "2"]],
)
def test_blend_refuses_what_has_no_meaning(entries: list[str]) -> None:
    with pytest.raises(UserError, match=r"data\.valid: got .*positive weights"):
        parse_blend(entries, "data.valid")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 30, 97, 1024])
def test_every_epoch_reads_every_sample_once(size: int) -> None:
    orders = [[epoch_index(epoch * size + i, size) for i in range(size)] for epoch in range(5)]
    assert all(sorted(order) == list(range(size)) for order in orders)
    assert orders[0] == list(range(size))  # the data set is shuffled already
    if size >= 30:
        assert len({tuple(order) for order in orders}) == 5


def global_batches(dp_size: int, start: int, count: int, size: int = 50) -> list[list[int]]:
    """The first `count` global batches of 8, put together from the micro-batches of 2 of all ranks."""
    streams = [
        micro_batch_indices(start, None, size, micro_batch=2, dp_ranks=(rank,), dp_size=dp_size)
        for rank in range(dp_size)
    ]
    steps = 8 // (2 * dp_size)
    return [
        [index for _ in range(steps) for rank, stream in enumerate(streams) for index in next(stream)[rank]]
        for _ in range(count)
    ]


@pytest.mark.parametrize("dp_size", [2, 4])
def test_global_batches_do_not_depend_on_the_number_of_ranks(dp_size: int) -> None:
    expected = global_batches(1, 0, 20)
    assert global_batches(dp_size, 0, 20) == expected
    assert sorted(itertools.chain(*expected[:6])) == list(range(48))  # nothing twice, nothing left out


@pytest.mark.parametrize("dp_size", [1, 4])
def test_a_resume_goes_on_where_the_run_stopped(dp_size: int) -> None:
    """Also in the third epoch, and with another number of ranks than before."""
    whole = global_batches(2, 0, 20)
    for step in (1, 7, 13):
        assert global_batches(dp_size, step * 8, 20 - step) == whole[step:]


def test_indices_stop() -> None:
    batches = list(micro_batch_indices(4, 12, 100, micro_batch=2, dp_ranks=(1,), dp_size=2))
    assert batches == [{1: [6, 7]}, {1: [10, 11]}]


def test_a_rank_knows_what_the_others_of_its_gate_group_read() -> None:
    both = list(micro_batch_indices(4, 20, 100, micro_batch=2, dp_ranks=(0, 1), dp_size=2))
    alone = [list(micro_batch_indices(4, 20, 100, micro_batch=2, dp_ranks=(r,), dp_size=2)) for r in (0, 1)]
    assert both == [{**first, **second} for first, second in zip(*alone, strict=True)]


@pytest.fixture
def cfg(tmp_path: Path) -> RunConfig:
    """A run on a tiny data set of its own."""
    return load_config(write_run(tmp_path, "run")[0])


def test_samples_hold_every_token_of_an_epoch_once(cfg: RunConfig, world: Any) -> None:
    import numpy as np

    datasets = build_datasets(cfg)
    length = cfg.train.seq_length
    samples = [datasets.train[i] for i in range(len(datasets.train))]
    assert all(sample["tokens"].shape == (length,) for sample in samples)
    assert all((sample["tokens"][1:] == sample["labels"][:-1]).all() for sample in samples)
    stored = np.fromfile(f"{cfg.data.train[0]}.bin", dtype=np.uint16)
    read = np.concatenate([sample["tokens"].numpy() for sample in samples])
    assert len(read) == (len(stored) - 1) // length * length
    counts, have = (np.bincount(ids, minlength=64) for ids in (read, stored))
    assert (counts <= have).all() and have.sum() - counts.sum() <= length + 1


def fingerprint(cfg: RunConfig, **sections: Any) -> str:
    return build_datasets(replace(cfg, **{k: replace(getattr(cfg, k), **v) for k, v in sections.items()})).fingerprint


def test_fingerprint_changes_with_the_order_of_samples_and_with_nothing_else(cfg: RunConfig, world: Any) -> None:
    same = fingerprint(cfg)
    assert fingerprint(cfg, train={"steps": 99, "global_batch_size": 8}) == same  # a longer run keeps its order
    assert fingerprint(cfg, data={"valid": ()}, model={"hidden_size": 48}, optimizer={"lr": 1.0}) == same
    other = write_dataset(Path(cfg.data.train[0]).with_name("other"), 30)
    changed = [
        fingerprint(cfg, run={"seed": 8}),
        fingerprint(cfg, train={"seq_length": 8}),
        fingerprint(cfg, data={"eod_id": 5}),
        fingerprint(cfg, data={"train": (other,)}),
        fingerprint(cfg, data={"train": (*cfg.data.train, other)}),
        fingerprint(cfg, data={"train": ("1", *cfg.data.train, "2", other)}),
        fingerprint(cfg, data={"train": ("2", *cfg.data.train, "1", other)}),
        fingerprint(cfg, data={"train": ("1", *cfg.data.train, "2", other)}, train={"steps": 99}),
    ]
    assert len({same, *changed}) == 1 + len(changed)


def test_fingerprint_changes_when_the_data_are_made_anew(cfg: RunConfig, world: Any) -> None:
    """Same name, same number of samples, other text: the manifest's checksum tells."""
    before = fingerprint(cfg)
    manifest = Path(f"{cfg.data.train[0]}.json")
    content = json.loads(manifest.read_text())
    content["sha256"]["bin"] = "0" * 64
    manifest.write_text(json.dumps(content))
    assert fingerprint(cfg) != before


def test_fingerprint_does_not_change_when_the_data_moves(cfg: RunConfig, world: Any, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    Path(cfg.data.train[0]).parent.rename(moved)
    before = Path(cfg.data.train[0]).name
    entries = {"train": (str(moved / before),), "valid": (), "cache_dir": str(tmp_path / "cache")}
    after = fingerprint(cfg, data=entries)
    moved.rename(Path(cfg.data.train[0]).parent)
    assert after == fingerprint(cfg)


def test_too_little_data_is_refused(cfg: RunConfig, world: Any) -> None:
    with pytest.raises(UserError, match=r"data\.train: .*less than one sample of 100000 tokens"):
        fingerprint(cfg, train={"seq_length": 100_000})


def test_end_of_document_id(cfg: RunConfig, tmp_path: Path) -> None:
    assert resolve_eod(cfg) == 0
    assert resolve_eod(replace(cfg, data=replace(cfg.data, eod_id=3))) == 3
    Path(f"{cfg.data.train[0]}.json").unlink()
    with pytest.raises(UserError, match=r"data\.eod_id: .*set data\.eod_id=N"):
        resolve_eod(cfg)


def test_tokenizer_of_the_training_data(cfg: RunConfig, tmp_path: Path) -> None:
    """Known only where all of the data says the same."""
    (prefix,) = cfg.data.train
    own, second = Path(f"{prefix}.json"), tmp_path / "second.json"
    both = replace(cfg, data=replace(cfg.data, train=(prefix, str(tmp_path / "second"))))
    known = "1" * 64
    own.write_text(json.dumps({"tokenizer_sha256": known}))
    assert tokenizer_sha256(cfg) == known
    assert tokenizer_sha256(both) is None  # no manifest
    for other, common in (("0" * 64, None), ("", None), (known, known)):
        second.write_text(json.dumps({"tokenizer_sha256": other}))
        assert tokenizer_sha256(both) == common
    own.write_text(json.dumps({"tokenizer_sha256": ""}))  # token lists: no tokenizer was read
    assert tokenizer_sha256(cfg) is None
