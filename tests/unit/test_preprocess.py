"""The preprocessor: the right documents, in the right order, ended once, in megatron-core's bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from egmla_megatron.data.verify import verify_prefix
from egmla_megatron.errors import UserError
from egmla_megatron.preprocess.options import shard_from
from egmla_megatron.preprocess.select import is_validation
from tests.preprocess import (
    EOS,
    VOCAB,
    documents,
    ended,
    parts_of,
    run,
    stored,
    write_jsonl,
    write_lines,
    write_parquet,
)

ROWS = documents(60)
WRITERS: dict[str, Any] = {
    "t.jsonl": write_jsonl,
    "t.jsonl.gz": write_jsonl,
    "t.jsonl.zst": write_jsonl,
    "t.parquet": write_parquet,
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(("vocab", "dtype"), [(VOCAB, np.uint16), (70_000, np.int32)])
def test_bytes_equal_megatrons_builder(tmp_path: Path, name: str, vocab: int, dtype: Any) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    rows = [*documents(30), [vocab - 2], *documents(30, 1)]
    manifest = run(tmp_path / "ours", WRITERS[name](tmp_path / name, rows), vocab_size=vocab)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for row in ended(rows):
        builder.add_item(torch.tensor(row))
        builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()
    assert verify_prefix(tmp_path / "ours", vocab_size=vocab, full=True).manifest == manifest
    assert not (tmp_path / "ours.parts").exists()


@pytest.mark.parametrize("kind", ["int32", "uint16", "large", "fixed"])
def test_other_arrow_types_of_ids(tmp_path: Path, kind: str) -> None:
    rows = [[1, 2], [3, 4], [98, 0]]
    types = {
        "int32": pa.list_(pa.int32()),
        "uint16": pa.list_(pa.uint16()),
        "large": pa.large_list(pa.int64()),
        "fixed": pa.list_(pa.int64(), 2),
    }
    run(tmp_path / "out", write_parquet(tmp_path / "t.parquet", pa.array(rows, types[kind])))
    assert stored(tmp_path / "out") == ended(rows)


@pytest.mark.parametrize("name", ["t.jsonl", "t.parquet"])
@pytest.mark.parametrize(
    ("mode", "rows", "expected", "found"),
    [
        ("auto", [[1, EOS], [2, 3, EOS]], [[1, EOS], [2, 3, EOS]], "present"),
        ("auto", [[1], [2, 3]], [[1, EOS], [2, 3, EOS]], "absent"),
        ("auto", [[1, EOS], [2, 3]], [[1, EOS], [2, 3, EOS]], "mixed"),
        ("auto", [[1, EOS, EOS, EOS], [EOS], [2], []], [[1, EOS], [2, EOS]], "mixed"),
        ("auto", [[EOS, 1], [2, EOS, 3, EOS]], [[EOS, 1, EOS], [2, EOS, 3, EOS]], "mixed"),
        ("always", [[1, EOS], [2], [EOS]], [[1, EOS, EOS], [2, EOS]], "mixed"),
        ("never", [[1, EOS, EOS], [2], [EOS], []], [[1, EOS, EOS], [2]], "mixed"),
    ],
)
def test_end_of_document(tmp_path: Path, name: str, mode: str, rows: Any, expected: Any, found: str) -> None:
    manifest = run(tmp_path / "out", WRITERS[name](tmp_path / name, rows), append_eos=mode)
    assert stored(tmp_path / "out") == expected
    entry = manifest["inputs"][0]
    assert entry["end_of_document"] == found and entry["documents"] == len(expected)
    assert entry["empty"] == len(rows) - len(expected)
    assert entry["inner_eos"] == sum(id == EOS for row in expected for id in row[:-1]) - (
        sum(len(row) > 1 and row[-2] == EOS for row in expected)
    )


@pytest.mark.parametrize("name", ["t.jsonl", "t.parquet"])
def test_nulls_and_empty_rows_are_counted(tmp_path: Path, name: str) -> None:
    manifest = run(tmp_path / "out", WRITERS[name](tmp_path / name, [None, [1], [], None, [2, 3], None]))
    assert stored(tmp_path / "out") == ended([[1], [2, 3]])
    entry = manifest["inputs"][0]
    assert (entry["rows"], entry["null"], entry["empty"], entry["documents"]) == (6, 3, 1, 2)


def test_any_mix_of_inputs_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    a, b, c, d = documents(4, 3), documents(5, 4), documents(6, 5), documents(7, 6)
    write_parquet(folder / "deep" / "b.parquet", b)
    write_jsonl(folder / "deep" / "a.jsonl", a, column="tokens")
    (folder / "README.md").write_text("no data")
    write_jsonl(tmp_path / "x1.jsonl.gz", c)
    write_jsonl(tmp_path / "x2.jsonl.zst", d)
    run(tmp_path / "out", str(folder), str(tmp_path / "x*.jsonl.*"))
    assert stored(tmp_path / "out") == ended([*a, *b, *c, *d])
    printed = capsys.readouterr().out
    assert "b.parquet: parquet, tokens in column tokens" in printed and "README" not in printed
    assert "CC BY-NC" not in printed


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from egmla_megatron.data.train_tokenizer import train_sentencepiece

    text = Path(json.__file__).with_name("decoder.py").read_text(encoding="utf-8")
    return train_sentencepiece([text], tmp_path_factory.mktemp("tokenizer") / "tiny.model", vocab_size=700)


def test_text_of_every_kind(tmp_path: Path, model_file: Path) -> None:
    from egmla_megatron.data.tokenizer import load_tokenizer

    texts = ["one two", "", "é 日本\n\n", "def f(x): return x", "</s> is text"]
    tokenizer = load_tokenizer(model_file)
    expected = [[*tokenizer.encode(text), tokenizer.eod] for text in texts if text]
    (tmp_path / "whole.txt").write_text("\n".join(texts))
    options: dict[str, Any] = {"tokenizer": str(model_file), "vocab_size": None, "eos_id": None}
    inputs = [
        write_jsonl(tmp_path / "t.jsonl", texts, "content"),
        write_parquet(tmp_path / "t.parquet", texts, "content"),
        str(tmp_path / "whole.txt"),
    ]
    manifest = run(tmp_path / "out", *inputs, text_column="content", **options)
    assert stored(tmp_path / "out") == [*expected, *expected, [*tokenizer.encode("\n".join(texts)), tokenizer.eod]]
    assert manifest["tokenizer_sha256"] == tokenizer.sha256 and manifest["vocab_size"] == 700
    assert [entry["kind"] for entry in manifest["inputs"]] == ["text"] * 3
    with parts_of(1):  # a part each: workers get the tokenizer handed over
        run(tmp_path / "two", *inputs, text_column="content", workers=2, **options)
    assert stored(tmp_path / "two") == stored(tmp_path / "out")


def test_lines_are_cut_into_parts_exactly_once(tmp_path: Path) -> None:
    """Whatever the cut: at a line's start, in it, at its end, with lines longer than a part."""
    rows = [*documents(20), list(range(98)) * 3, *documents(20, 1)]
    path = write_jsonl(tmp_path / "t.jsonl", rows)
    (tmp_path / "t.jsonl").write_bytes((tmp_path / "t.jsonl").read_bytes().rstrip(b"\n"))
    for size in (11, 64, 100, 1000):
        with parts_of(size):
            run(tmp_path / f"out{size}", path)
        assert stored(tmp_path / f"out{size}") == ended(rows)


def test_parquet_is_cut_into_parts(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "t.parquet", ROWS)
    with parts_of(500):
        run(tmp_path / "out", path)
    assert stored(tmp_path / "out") == ended(ROWS)


def test_shuffle_is_a_permutation_that_only_the_seed_decides(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "t.parquet", ROWS)
    run(tmp_path / "a", path, shuffle=True, seed=1)
    with parts_of(300):
        run(tmp_path / "b", path, shuffle=True, seed=1)
        run(tmp_path / "c", path, shuffle=True, seed=2)
    a, b, c = (stored(tmp_path / name) for name in "abc")
    assert a == b and a != c and a != ended(ROWS)
    assert sorted(a) == sorted(c) == sorted(ended(ROWS))


def test_validation_documents_are_the_same_when_files_are_added(tmp_path: Path) -> None:
    one = write_parquet(tmp_path / "one.parquet", ended(documents(300)))
    two = write_jsonl(tmp_path / "two.jsonl", documents(300, 1))
    bare = write_jsonl(tmp_path / "bare.jsonl", documents(300))
    for name, inputs in {"a": [one], "b": [two, one], "c": [bare]}.items():
        run(tmp_path / name, *inputs, validation_fraction=0.1)
    a, b, c = (set(map(tuple, stored(tmp_path / f"{name}_val"))) for name in "abc")
    assert 10 < len(a) < 60 and a < b and a == c  # the end-of-document id of the input does not matter
    train = set(map(tuple, stored(tmp_path / "b")))
    assert not train & b and len(train) + len(b) == len(set(map(tuple, documents(300) + documents(300, 1))))
    manifest = json.loads((tmp_path / "b_val.json").read_text())
    assert manifest["preprocess"]["validation_fraction"] == 0.1 and manifest["split"] == "val"
    verify_prefix(tmp_path / "b_val", full=True)


def test_validation_share() -> None:
    hashes = np.random.default_rng(0).integers(0, 2**64, (200_000, 2), np.uint64, endpoint=False)
    chosen = [is_validation(hashes, fraction) for fraction in (0.0, 0.0005, 0.1, 1 - 1e-12)]
    assert [round(float(found.mean()), 4) for found in chosen][::3] == [0.0, 1.0]
    assert 60 < chosen[1].sum() < 140 and (chosen[2] >= chosen[1]).all()


def test_duplicates_go_by_option(tmp_path: Path) -> None:
    rows = [[1, 2], [3], [1, 2, EOS], [1, 2, 3], [3], [1, 2]]
    path = write_jsonl(tmp_path / "t.jsonl", rows)
    manifest = run(tmp_path / "out", path, dedupe=True)
    assert stored(tmp_path / "out") == ended([[1, 2], [3], [1, 2, 3]])  # the first of each stays
    assert manifest["preprocess"]["duplicates_dropped"] == 3
    assert run(tmp_path / "all", path)["preprocess"]["duplicates_dropped"] == 0


@pytest.mark.parametrize("name", ["t.jsonl", "t.parquet"])
def test_clusters_are_counted_and_can_be_written_apart(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    clusters = [i % 3 - 1 for i in range(len(ROWS))]  # -1 is a cluster like others: some clusterings call noise so
    more: Any = pa.array(clusters) if name.endswith("parquet") else clusters
    path = WRITERS[name](tmp_path / f"climbmix-{name}", ROWS, cluster_id=more)
    manifest = run(tmp_path / "out", path, by_cluster=True)
    for cluster in (-1, 0, 1):
        expected = ended([row for row, found in zip(ROWS, clusters, strict=True) if found == cluster])
        assert stored(tmp_path / f"out_cluster{cluster}") == expected
        sizes = {"documents": len(expected), "tokens": sum(map(len, expected))}
        assert manifest["clusters"][str(cluster)] == sizes
        verify_prefix(tmp_path / f"out_cluster{cluster}", full=True)
    assert capsys.readouterr().out.count("CC BY-NC 4.0") == 1
    run(tmp_path / "out", path, overwrite=True)  # stale ones go
    assert not list(tmp_path.glob("out_cluster*"))


def test_summary_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [[5] * 8192, [6, 7], None, []]
    manifest = run(tmp_path / "out", write_jsonl(tmp_path / "t.jsonl", rows))
    assert manifest["longest_document"] == 8193 and manifest["preprocess"]["distinct_ids"] == 4
    assert manifest["unique_fraction_of_8192"] == round(1 / 8192, 4)
    printed = " ".join(capsys.readouterr().out.split())
    for text in ("documents 2 ", "tokens 8,196 ", "distinct ids 4 of 100", "1 null, 1 empty, 0 faulty of 4"):
        assert text in printed


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_hub_data_sets_stream(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The datasets library's own loading of a small local repository of three files."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    repository = tmp_path / "repository"
    (repository / "data").mkdir(parents=True)
    for number in range(3):
        rows = ROWS[20 * number : 20 * (number + 1)]
        WRITERS[f"t.{form}"](repository / "data" / f"train-{number}.{form}", rows)
    manifest = run(tmp_path / "out", f"hf:{repository}")
    assert stored(tmp_path / "out") == ended(ROWS)
    assert manifest["inputs"][0]["rows"] == 60 and manifest["inputs"][0]["format"] == "hub"


def test_tasks_share_the_work_and_the_last_one_merges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", ROWS)
    with parts_of(400):
        run(tmp_path / "whole", path, shuffle=True)
        for shard in (2, 0):
            with pytest.raises(FileNotFoundError):  # no manifest yet
                run(tmp_path / "out", path, shuffle=True, shard=shard, shards=3)
        assert "parts are left to other tasks" in capsys.readouterr().out
        run(tmp_path / "out", path, shuffle=True, shard=1, shards=3)
        for suffix in ("bin", "idx"):
            assert (tmp_path / f"out.{suffix}").read_bytes() == (tmp_path / f"whole.{suffix}").read_bytes()
        run(tmp_path / "out", path, shuffle=True, shard=0, shards=3)  # a task that comes late
    assert "already complete" in capsys.readouterr().out


def test_shard_of_a_task() -> None:
    slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}
    assert shard_from(None, slurm) == (3, 8) and shard_from("1/2", slurm) == (1, 2) and shard_from(None, {}) == (0, 1)
    for text in ("2/2", "1", "-1/2", "a/b"):
        with pytest.raises(UserError, match=r"--shard: got .*allowed i/n"):
            shard_from(text, {})


def test_command_line(tmp_path: Path, root: Path) -> None:
    """A mistake in the arguments is one line."""
    tool = [sys.executable, root / "tools" / "preprocess_data.py"]
    for number in range(2):
        write_lines(tmp_path / f"{number}.jsonl", [json.dumps({"tokens": row}) for row in ROWS])
    arguments = ["--input", tmp_path / "0.jsonl", tmp_path / "1.jsonl", "--output-prefix", tmp_path / "out"]
    options = ["--vocab-size", "100", "--eos-id", "99", "--no-shuffle", "--validation-fraction", "0", "--workers", "2"]
    good = subprocess.run([*tool, *arguments, *options], capture_output=True, text=True, timeout=120)
    assert good.returncode == 0, good.stderr
    assert "tokens in column tokens" in good.stdout and "documents " in good.stdout
    assert stored(tmp_path / "out") == ended(ROWS * 2)
    for wrong in ([*arguments, "--append-eos", "perhaps"], ["--input"], [*arguments, "--shard", "4/2"], arguments):
        bad = subprocess.run([*tool, *wrong], capture_output=True, text=True, timeout=60)
        assert bad.returncode == 2 and bad.stderr.startswith("error: ") and bad.stderr.count("\n") == 1
