"""Indexes beyond 2^31 tokens, on synthetic lengths and sparse files: no gigabyte is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from egmla_megatron.data.index_file import write_index
from egmla_megatron.data.verify import verify_prefix
from egmla_megatron.preprocess.assemble import assemble
from egmla_megatron.preprocess.part import part_file
from egmla_megatron.preprocess.select import load_catalogue

PARTS = 100
PER_PART = 45_000_000  # tokens: 100 parts hold 4.5e9 tokens, 9 GB as uint16
U16 = np.dtype(np.uint16)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize(
    "lengths", [[5, 1, 7], [2**31 - 1, 3, 2**31 - 1, 2**31 - 1, 9], [40_000_000] * 120], ids=["small", "long", "many"]
)
def test_index_equals_megatrons(tmp_path: Path, lengths: list[int], dtype: type) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder("/dev/null", dtype=dtype)
    builder.sequence_lengths = lengths
    builder.document_indices = list(range(len(lengths) + 1))
    builder.finalize(str(tmp_path / "theirs.idx"))
    write_index(tmp_path / "ours.idx", np.array(lengths, np.int32), np.dtype(dtype))
    assert (tmp_path / "ours.idx").read_bytes() == (tmp_path / "theirs.idx").read_bytes()


def sparse(path: Path, tokens: int, at: dict[int, list[int]]) -> None:
    """A .bin of so many tokens that is a hole except for the ids at some positions."""
    with path.open("wb") as out:
        out.truncate(2 * tokens)
        for position, ids in at.items():
            out.seek(2 * position)
            out.write(np.array(ids, U16).tobytes())


def test_a_document_beyond_2_to_the_31_is_found(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    lengths = np.array([2**31 - 1, 2**31 - 1, 4, 3])
    write_index(tmp_path / "big.idx", lengths, U16)
    sparse(tmp_path / "big.bin", int(lengths.sum()), {2 * (2**31 - 1): [1, 2, 3, 4, 5, 6, 7]})
    info = verify_prefix(tmp_path / "big", vocab_size=8, sample=True)
    assert info.tokens == 2**32 + 5 and info.documents == 4
    dataset = IndexedDataset(str(tmp_path / "big"))
    assert dataset[2].tolist() == [1, 2, 3, 4] and dataset[3].tolist() == [5, 6, 7]
    del dataset


def test_a_hundred_parts_of_more_than_2_to_the_31_tokens(tmp_path: Path) -> None:
    """Offsets within and across parts, and the copying of the last documents of the last part."""
    lengths = np.array([PER_PART - 10, 6, 4])
    for part in range(PARTS):
        sparse(part_file(tmp_path, part, "bin"), PER_PART, {PER_PART - 10: [part] * 6 + [part + 1000] * 4})
        np.savez(
            part_file(tmp_path, part, "npz").open("wb"),
            lengths=lengths,
            hashes=np.zeros((3, 2), np.uint64),
            clusters=np.zeros(3, np.int64),
            seen=np.packbits(np.arange(50_257) < part),
        )
    catalogue = load_catalogue(tmp_path, PARTS)
    assert len(catalogue.lengths_D) == 3 * PARTS and int(catalogue.lengths_D.sum()) == 4_500_000_000 > 2**31
    assert catalogue.distinct_ids == PARTS - 1
    write_index(tmp_path / "all.idx", catalogue.lengths_D, U16)
    sparse(tmp_path / "all.bin", PARTS * PER_PART, {})
    assert verify_prefix(tmp_path / "all").tokens == 4_500_000_000
    order = np.array([3 * 99 + 2, 1, 3 * 50 + 1, 3 * 50 + 2])
    assemble(tmp_path / "few.bin", tmp_path, catalogue, order, U16, lambda count: None, chunk_bytes=16)
    expected = [1099] * 4 + [0] * 6 + [50] * 6 + [1050] * 4
    assert np.fromfile(tmp_path / "few.bin", U16).tolist() == expected


def test_one_part_of_more_than_2_to_the_31_tokens(tmp_path: Path) -> None:
    lengths = np.array([2**31 - 1, 2**30, 3])
    sparse(part_file(tmp_path, 0, "bin"), int(lengths.sum()), {2**31 - 1 + 2**30: [7, 8, 9]})
    arrays = {"hashes": np.zeros((3, 2), np.uint64), "clusters": np.zeros(3, np.int64), "seen": np.zeros(9, np.uint8)}
    np.savez(part_file(tmp_path, 0, "npz").open("wb"), allow_pickle=False, lengths=lengths, **arrays)
    catalogue = load_catalogue(tmp_path, 1)
    assemble(tmp_path / "out.bin", tmp_path, catalogue, np.array([2]), U16, lambda count: None)
    assert np.fromfile(tmp_path / "out.bin", U16).tolist() == [7, 8, 9]
