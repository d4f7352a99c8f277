"""Index caches are whole or absent; options that the model would ignore are refused; weights hold for validation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from egmla_megatron.config.load import load_config
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.data import index_cache
from egmla_megatron.data.batch import Batch, DataShare, batch_iterator
from egmla_megatron.data.dataset import build_datasets
from egmla_megatron.data.documents import check_document_options
from egmla_megatron.data.index_cache import index_folder
from egmla_megatron.errors import UserError
from tests.tiny import MHA, TINY, tiny_model, write_dataset, write_run


@pytest.fixture
def cfg(tmp_path: Path) -> RunConfig:
    return load_config(write_run(tmp_path, "run")[0])


def changed(cfg: RunConfig, **sections: Any) -> RunConfig:
    return replace(cfg, **{name: replace(getattr(cfg, name), **changes) for name, changes in sections.items()})


def folders(cfg: RunConfig) -> list[str]:
    cache = Path(cfg.run.dir) / "data_cache"
    return sorted(path.name for path in cache.iterdir() if path.is_dir())


def test_indices_are_built_once(cfg: RunConfig, world: Any) -> None:
    build_datasets(cfg)
    files = {path: path.stat().st_mtime_ns for path in (Path(cfg.run.dir) / "data_cache").rglob("*.npy")}
    assert len(files) == 6 and len(folders(cfg)) == 2 and not any(name.startswith(".") for name in folders(cfg))
    build_datasets(changed(cfg, optimizer={"lr": 1.0}))
    assert files == {path: path.stat().st_mtime_ns for path in (Path(cfg.run.dir) / "data_cache").rglob("*.npy")}


def test_a_killed_build_leaves_nothing_that_is_read(
    cfg: RunConfig, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [sample["tokens"].tolist() for sample in map(build_datasets(cfg).train.__getitem__, range(8))]
    other = changed(cfg, data={"cache_dir": str(Path(cfg.run.dir) / "other")})

    class Killed(BaseException):
        pass

    saved: list[str] = []
    save = np.save

    def cut_short(path: str, array: np.ndarray, **options: Any) -> None:
        save(path, array, **options)
        saved.append(path)
        if len(saved) == 3:  # the last of the training indices
            Path(path).write_bytes(Path(path).read_bytes()[:-8])
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(np, "save", cut_short)
        build_datasets(other)
    left = [path.name for path in Path(other.data.cache_dir).iterdir() if path.is_dir()]
    assert len(left) == 1 and left[0].startswith(".")
    again = build_datasets(other)
    assert [again.train[i]["tokens"].tolist() for i in range(8)] == whole
    assert not [path for path in Path(other.data.cache_dir).iterdir() if path.is_dir() and path.name.startswith(".")]


def test_data_that_was_replaced_gets_new_indices(cfg: RunConfig, world: Any) -> None:
    first = len(build_datasets(cfg).train)
    write_dataset(Path(cfg.data.train[0]), 60, seed=9)
    assert len(build_datasets(cfg).train) > 2 * first


def test_a_cache_that_cannot_be_written(cfg: RunConfig, world: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"data\.cache_dir: .*cannot be written"):
        build_datasets(changed(cfg, data={"cache_dir": str(tmp_path / "file" / "cache")}))


def test_the_helper_of_a_node_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 cannot see its folder on some other node: every node builds alone."""
    monkeypatch.setattr(index_cache, "_everywhere", lambda base, name: False)

    def alone(folder: Path) -> list[str]:
        return ["python", "-c", "import os, sys; sys.exit('no ' + os.environ.get('RANK', 'rank'))"]

    monkeypatch.setenv("RANK", "5")
    with pytest.raises(RuntimeError, match="failed:\nno rank"), index_folder(tmp_path, "key", alone):
        pytest.fail("there are no indices to read")
    assert not (tmp_path / "key").exists()


def test_weights_hold_for_validation(cfg: RunConfig, world: Any) -> None:
    other = write_dataset(Path(cfg.data.valid[0]).with_name("other"), 20, seed=5)
    weighted = changed(cfg, data={"valid": ("3", cfg.data.valid[0], "1", other)}, train={"eval_batches": 10})
    valid = build_datasets(weighted).valid
    samples = 10 * cfg.train.global_batch_size
    assert valid is not None and len(valid) == pytest.approx(samples, abs=1)
    assert np.bincount(valid.dataset_index).tolist() == [3 * samples // 4, samples // 4]


def test_masks_that_no_kernel_honours_are_refused(cfg: RunConfig) -> None:
    with pytest.raises(UserError, match=r"data\.reset_attention_mask: got true, allowed false \(the attention kernels"):
        check_document_options(changed(cfg, data={"reset_attention_mask": True}))
    with pytest.raises(UserError, match=r"data\.reset_position_ids: got true with model\.attention=mla.*rotary"):
        check_document_options(changed(cfg, data={"reset_position_ids": True}))


def first_batch(dataset: Any, numbers: list[int]) -> Batch:
    share = DataShare(TINY.vocab_size)
    return next(batch_iterator(dataset, [{0: numbers}], torch.device("cpu"), num_workers=0, share=share))


def test_learned_positions_can_count_from_each_document(cfg: RunConfig, world: Any) -> None:
    mha = replace(cfg, model=tiny_model(**MHA), data=replace(cfg.data, reset_position_ids=True))
    dataset = build_datasets(mha).train
    batch = first_batch(dataset, [0, 1, 2, 3])
    expected = torch.zeros_like(batch.tokens_BS)
    for row, tokens in enumerate(batch.tokens_BS.tolist()):
        position = 0
        for column, token in enumerate(tokens):
            expected[row, column] = position
            position = 0 if token == 0 else position + 1  # id 0 ends documents here
    assert torch.equal(batch.position_ids_BS, expected)
    assert (batch.position_ids_BS != torch.arange(cfg.train.seq_length)).any()
    plain = first_batch(build_datasets(cfg).train, [0, 1])
    assert torch.equal(plain.position_ids_BS, torch.arange(cfg.train.seq_length).expand(2, -1))


@pytest.mark.parametrize("masked", [False, True])
def test_loss_behind_a_documents_end(cfg: RunConfig, world: Any, masked: bool) -> None:
    dataset = build_datasets(changed(cfg, data={"eod_mask_loss": masked})).train
    batch = first_batch(dataset, [0, 1, 2, 3])
    ends = batch.tokens_BS == 0
    assert ends.any() and (batch.loss_mask_BS[ends] == (0.0 if masked else 1.0)).all()
    assert (batch.loss_mask_BS[~ends] == 1).all()
