"""Options, inputs and output names of the preprocessor that cannot be meant: one line each, and nothing written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from egmla_megatron.errors import UserError
from egmla_megatron.preprocess.options import prefix_from
from tests.preprocess import documents, run, stored, write_jsonl

GOOD = documents(20)


def test_end_of_document_id_beyond_the_vocabulary(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", GOOD)
    with pytest.raises(UserError, match=r"--eos-id: got 100, allowed 0 to 99 \(--vocab-size 100\)"):
        run(tmp_path / "out", path, eos_id=100)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation_fraction": 1.0}, "--validation-fraction: got 1.0"),
        ({"validation_fraction": float("nan")}, "--validation-fraction: got nan"),
        ({"workers": 0}, "--workers: got 0"),
        ({"seed": -1}, "--seed: got -1"),
        ({"vocab_size": 0}, "--vocab-size: got 0, allowed 1 to"),
        ({"vocab_size": 10**14}, "--vocab-size: got 1000000"),
        ({"by_cluster": True}, "--by-cluster: no input has a column cluster_id"),
        ({"text_column": "tokens"}, "--tokens-column and --text-column"),
    ],
)
def test_options_without_meaning(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(tmp_path / "out", write_jsonl(tmp_path / "x.jsonl", GOOD), **options)


def test_the_same_input_twice(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", GOOD)
    with pytest.raises(UserError, match="is given twice"):
        run(tmp_path / "out", path, str(tmp_path / "*.jsonl"))


def test_the_same_file_by_another_name(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", GOOD)
    (tmp_path / "link.jsonl").symlink_to(path)
    with pytest.raises(UserError, match="is given twice"):
        run(tmp_path / "out", path, str(tmp_path / "link.jsonl"))


def test_an_empty_input_is_not_the_current_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--input: got an empty name"):
        run(tmp_path / "out", "")


def test_outputs_among_the_inputs_are_not_read_again(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "x.jsonl", GOOD)
    run(tmp_path / "first", str(tmp_path))
    run(tmp_path / "second", str(tmp_path))
    assert stored(tmp_path / "second") == stored(tmp_path / "first")


def test_clusters_that_are_no_whole_numbers_are_none(tmp_path: Path) -> None:
    table = pa.table({"tokens": GOOD[:2], "cluster_id": [1.5, -3.0]})
    pq.write_table(table, tmp_path / "x.parquet")
    run(tmp_path / "out", str(tmp_path / "x.parquet"))
    with pytest.raises(UserError, match="--by-cluster: no input has a column cluster_id of whole numbers"):
        run(tmp_path / "clusters", str(tmp_path / "x.parquet"), by_cluster=True)


@pytest.mark.parametrize("text", ["", ".", "..", "/", "made/", "x.bin", "x.idx", "n" * 250, "/proc/none/x"])
def test_output_prefixes_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="--output-prefix: got"):
        prefix_from(text)
    assert list(tmp_path.iterdir()) == []
