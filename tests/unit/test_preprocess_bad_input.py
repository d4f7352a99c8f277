"""Everything that can be wrong with inputs, options and disks: one line that names it, or counted and left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from egmla_megatron.errors import UserError
from egmla_megatron.preprocess import command
from egmla_megatron.preprocess.options import Options
from egmla_megatron.preprocess.vocabulary import Vocabulary
from tests.preprocess import documents, ended, parts_of, run, stored, write_jsonl, write_lines, write_parquet

GOOD = documents(20)


def damaged(path: str, offset: int, content: bytes) -> str:
    """The file with some bytes replaced; a negative offset counts from the end."""
    raw = bytearray(Path(path).read_bytes())
    offset %= len(raw)
    raw[offset : offset + len(content)] = content
    Path(path).write_bytes(raw)
    return path


def cut(path: str, share: float) -> str:
    """The first part of the file."""
    raw = Path(path).read_bytes()
    Path(path).write_bytes(raw[: int(share * len(raw))])
    return path


def bad_group(folder: Path) -> str:
    """A parquet file whose second row group's data page of ids is overwritten."""
    path = write_parquet(folder / "x.parquet", GOOD, group=10)
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    end = column.dictionary_page_offset + column.total_compressed_size
    return damaged(path, (column.data_page_offset + end) // 2, b"\xff" * 12)


def lines_with(folder: Path, line: str, name: str = "x.jsonl") -> str:
    """Three good lines with `line` as the second."""
    good = [json.dumps({"tokens": row}) for row in GOOD[:3]]
    return write_lines(folder / name, [good[0], line, *good[1:]])


def ids_with(folder: Path, row: Any, name: str) -> str:
    """Three good rows with `row` as the second."""
    rows = [GOOD[0], row, *GOOD[1:3]]
    return write_parquet(folder / name, rows) if name.endswith("parquet") else write_jsonl(folder / name, rows)


Make = Callable[[Path], str]
# name: (make the input, what the message says, documents left under --on-error skip)
ROW_FAULTS: dict[str, tuple[Make, str, int]] = {
    "corrupt row group": (bad_group, r"x\.parquet, row group 1 behind row 0: cannot be decoded", 10),
    "jsonl line": (lambda f: lines_with(f, '{"tokens": [1, 2'), r"x\.jsonl, line 2: not valid JSON", 3),
    "cut jsonl": (lambda f: cut(write_jsonl(f / "x.jsonl", GOOD), 0.995), r"x\.jsonl, line 20: not valid JSON", 19),
    "cut gz": (
        lambda f: cut(write_jsonl(f / "x.jsonl.gz", GOOD * 3000), 0.6),
        r"x\.jsonl\.gz, line \d+ and what follows: cannot be read \(.*end-of-stream",
        -1,
    ),
    "cut zst": (
        lambda f: cut(write_jsonl(f / "x.jsonl.zst", documents(90_000)), 0.6),
        r"x\.jsonl\.zst, line \d+ and what follows: cannot be read \(.*[Tt]runcated",
        -1,
    ),
    "bad bytes in gz": (
        lambda f: damaged(write_jsonl(f / "x.jsonl.gz", GOOD * 3000), -4, b"\0\0\0\1"),
        r"x\.jsonl\.gz, line \d+ and what follows: cannot be read \(.*length",
        -1,
    ),
    "id too large": (lambda f: ids_with(f, [1, 2, 100], "x.parquet"), r"row group 0, row 1: id 100 at token 2", 3),
    "id negative": (lambda f: ids_with(f, [1, -5, 3], "x.parquet"), r"row 1: id -5 at token 1, allowed 0 to 99", 3),
    "jsonl id too large": (lambda f: ids_with(f, [65_536], "x.jsonl"), r"line 2: id 65536 at token 0", 3),
    "jsonl id negative": (lambda f: ids_with(f, [-1], "x.jsonl"), r"line 2: id -1 at token 0", 3),
    "jsonl id huge": (lambda f: ids_with(f, [2**63], "x.jsonl"), r"line 2: 'tokens' holds .*63 bits", 3),
    "jsonl float": (lambda f: ids_with(f, [1, 2.0], "x.jsonl"), r"line 2: 'tokens' holds a list of float, int", 3),
    "jsonl bool": (lambda f: ids_with(f, [1, True], "x.jsonl"), r"line 2: 'tokens' holds a list of bool, int", 3),
    "jsonl null id": (lambda f: ids_with(f, [1, None], "x.jsonl"), r"line 2: 'tokens' holds a list of NoneType", 3),
    "parquet null id": (lambda f: ids_with(f, [1, None], "x.parquet"), r"row 1: got a null among its ids", 3),
    "mixed rows": (lambda f: ids_with(f, "text", "x.jsonl"), r"line 2: 'tokens' holds text, expected a list", 3),
    "missing key": (lambda f: lines_with(f, '{"other": 1}'), r"line 2: got keys other, expected 'tokens'", 3),
    "first line": (lambda f: write_lines(f / "x.jsonl", ["{", '{"tokens": [1]}']), r"x\.jsonl, line 1: not valid", 1),
    "cluster beyond int64": (
        lambda f: lines_with(f, '{"tokens": [1], "cluster_id": 18446744073709551615}'),
        r"line 2: 'cluster_id' holds 18446744073709551615",
        3,
    ),
    "cluster of another type": (
        lambda f: write_lines(
            f / "x.jsonl", ['{"tokens": [1], "cluster_id": 3}', '{"tokens": [2], "cluster_id": "3"}']
        ),
        r"line 2: 'cluster_id' holds '3', expected a whole number",
        1,
    ),
    "null id in the first row": (
        lambda f: write_lines(f / "x.jsonl", ['{"tokens": [1, null]}', '{"tokens": [2]}']),
        r"line 1: 'tokens' holds a list of NoneType",
        1,
    ),
    "no object": (lambda f: lines_with(f, "[1, 2]"), r"line 2: got a JSON list, expected an object", 3),
}
# These never pass: the input as a whole is not what was meant.
FILE_FAULTS: dict[str, tuple[Make, str]] = {
    "float ids": (
        lambda f: write_parquet(f / "x.parquet", pa.array([[1.0]], pa.list_(pa.float64()))),
        r"x\.parquet: column 'tokens': got list<.*double>, allowed lists of whole numbers",
    ),
    "float jsonl": (lambda f: write_jsonl(f / "x.jsonl", [[1.5]]), r"'tokens': got a list of float, allowed lists"),
    "missing column": (
        lambda f: write_parquet(f / "x.parquet", GOOD, column="ids"),
        r"x\.parquet: got columns ids, expected 'tokens' or 'text'; name the right one with --tokens-column",
    ),
    "missing jsonl key": (lambda f: write_jsonl(f / "x.jsonl", GOOD, column="ids"), r"got columns ids, expected"),
    "text column of ids": (lambda f: write_jsonl(f / "x.jsonl", GOOD, column="text"), r"'text': got a list|got ids"),
    "only empty rows": (lambda f: write_jsonl(f / "x.jsonl", [[], [], [99]]), r"none is left"),
    "empty folder": (lambda f: str(f), r"holds no \.parquet"),
    "no such file": (lambda f: str(f / "x.jsonl"), r"x\.jsonl does not exist"),
    "no match": (lambda f: str(f / "*.jsonl"), r"no file matches"),
    "other suffix": (lambda f: write_lines(f / "x.csv", ["a"]), r"x\.csv: the name ends in none of"),
    "no hub set": (lambda f: f"hf:{f}", r"the datasets library cannot load it"),
}
UNREADABLE: dict[str, tuple[Make, str]] = {
    "cut parquet": (lambda f: cut(write_parquet(f / "x.parquet", GOOD), 0.7), r"x\.parquet: not a complete parquet"),
    "no parquet": (lambda f: write_lines(f / "x.parquet", ["hello"]), r"x\.parquet: not a complete parquet file"),
    "no zst": (lambda f: damaged(write_jsonl(f / "x.jsonl.zst", GOOD), 0, b"nozst"), r"x\.jsonl\.zst: cannot be read"),
    "no gz": (lambda f: damaged(write_jsonl(f / "x.jsonl.gz", GOOD), 0, b"nogz"), r"x\.jsonl\.gz: cannot be read"),
    "empty file": (lambda f: write_lines(f / "x.jsonl", []), r"x\.jsonl: got 0 bytes, expected data"),
    "only bad lines": (
        lambda f: write_lines(f / "x.jsonl", ["{", "["]),
        r"x\.jsonl: got no usable row in 2 lines, .*; the first, line 1: not valid JSON \(column \d: [^():]*\)",
    ),
    "one bad line": (
        lambda f: write_lines(f / "x.jsonl", ["{"]),
        r"x\.jsonl, line 1: not valid JSON .*; it is the only line",
    ),
}


@pytest.mark.parametrize(("make", "message", "left"), ROW_FAULTS.values(), ids=ROW_FAULTS.keys())
def test_faulty_rows_stop_or_are_left_out(tmp_path: Path, make: Make, message: str, left: int) -> None:
    path = make(tmp_path)
    with pytest.raises(UserError, match=message):
        run(tmp_path / "out", path)
    assert not list(tmp_path.glob("out.*in")) and not list(tmp_path.glob("out.parts/*.tmp"))
    manifest = run(tmp_path / "out", path, on_error="skip")
    assert manifest["inputs"][0]["faults"] == 1 and manifest["faults"]
    if left >= 0:
        assert manifest["documents"] == left
    if left == 3:
        assert stored(tmp_path / "out") == ended(GOOD[:3])
    assert 0 < manifest["documents"] < 90_000


@pytest.mark.parametrize("on_error", ["stop", "skip"])
@pytest.mark.parametrize(("make", "message"), FILE_FAULTS.values(), ids=FILE_FAULTS.keys())
def test_inputs_that_never_pass(tmp_path: Path, make: Make, message: str, on_error: str) -> None:
    if "datasets library" in message and on_error == "skip":
        message = "without a usable file"
    (tmp_path / "in").mkdir()
    path = make(tmp_path / "in")
    with pytest.raises(UserError, match=message):
        run(tmp_path / "out", path, on_error=on_error)


@pytest.mark.parametrize(("make", "message"), UNREADABLE.values(), ids=UNREADABLE.keys())
def test_unreadable_files_stop_or_are_left_out(tmp_path: Path, make: Make, message: str) -> None:
    path, other = make(tmp_path), write_jsonl(tmp_path / "good.jsonl", GOOD)
    with pytest.raises(UserError, match=message):
        run(tmp_path / "out", path, other)
    manifest = run(tmp_path / "out", path, other, on_error="skip")
    assert manifest["unreadable_inputs"] == 1 and stored(tmp_path / "out") == ended(GOOD)
    with pytest.raises(UserError, match="without a usable file"):
        run(tmp_path / "alone", path, on_error="skip")


def test_a_fault_in_a_later_part_names_the_line_of_the_file(tmp_path: Path) -> None:
    lines = [json.dumps({"tokens": row}) for row in GOOD] + ["{"]
    with parts_of(100), pytest.raises(UserError, match=r"x\.jsonl, line 21: not valid JSON"):
        run(tmp_path / "out", write_lines(tmp_path / "x.jsonl", lines))


def test_faults_skipped_before_are_not_kept_when_faults_stop(tmp_path: Path) -> None:
    path = lines_with(tmp_path, "{")
    with parts_of(100):
        with pytest.raises(FileNotFoundError):
            run(tmp_path / "out", path, on_error="skip", shard=0, shards=1000)  # leaves the rest undone
        with pytest.raises(UserError, match="line 2"):
            run(tmp_path / "out", path)


def test_text_that_is_no_utf8(tmp_path: Path) -> None:
    from egmla_megatron.data.train_tokenizer import train_sentencepiece

    text = Path(json.__file__).with_name("decoder.py").read_text(encoding="utf-8")
    model = train_sentencepiece([text], tmp_path / "tiny.model", vocab_size=700)
    options: dict[str, Any] = {"tokenizer": str(model), "vocab_size": None, "eos_id": None}
    strings = pa.array([b"good", b"b\xff", b"more"], pa.binary()).view(pa.string())
    parquet = write_parquet(tmp_path / "x.parquet", strings, "text")
    (tmp_path / "x.txt").write_bytes(b"b\xff")
    for path, message in ((parquet, "row 1: text is no UTF-8"), (str(tmp_path / "x.txt"), "as UTF-8")):
        with pytest.raises(UserError, match=message):
            run(tmp_path / f"out of {Path(path).name}", path, **options)
    manifest = run(tmp_path / "out", parquet, str(tmp_path / "x.txt"), on_error="skip", **options)
    assert manifest["documents"] == 2 and len(manifest["faults"]) == 2
    with pytest.raises(UserError, match=r"--vocab-size: got 600, allowed at least the 700 ids of the tokenizer"):
        run(tmp_path / "other", parquet, **{**options, "vocab_size": 600})


def test_an_output_that_exists(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", GOOD)
    run(tmp_path / "out", path)
    before = (tmp_path / "out.bin").read_bytes()
    with pytest.raises(UserError, match=r"--output-prefix: .*out\.\* exist.*use --overwrite"):
        run(tmp_path / "out", path)
    run(tmp_path / "out", path, overwrite=True, append_eos="never")
    assert stored(tmp_path / "out") == GOOD and (tmp_path / "out.bin").read_bytes() != before
    (tmp_path / "lone_val.idx").touch()
    with pytest.raises(UserError, match=r"lone_val\.\* exist"):
        run(tmp_path / "lone", path)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"tokenizer": "another"}, "tokenizer: got another, allowed gpt2"),
        ({"eos_id": 98}, "eos_id: got 98, allowed 99"),
        ({"vocab_size": 200}, "vocab_size: got 200, allowed 100"),
        ({"append_eos": "never"}, "append_eos: got never, allowed auto"),
    ],
)
def test_shards_of_another_run_are_not_mixed(
    tmp_path: Path, change: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = command.find_vocabulary

    def named_as_asked(options: Options, *, has_text: bool) -> Vocabulary:  # a second tokenizer of the same size
        return replace(find(replace(options, tokenizer="gpt2"), has_text=has_text), tokenizer=options.tokenizer)

    monkeypatch.setattr(command, "find_vocabulary", named_as_asked)
    path = write_jsonl(tmp_path / "x.jsonl", GOOD)
    with parts_of(200):
        with pytest.raises(FileNotFoundError):
            run(tmp_path / "out", path, shard=0, shards=2)
        with pytest.raises(UserError, match=f"holds shards of another run: {what}.*same options again"):
            run(tmp_path / "out", path, **change)
        with pytest.raises(UserError, match="delete that folder"):  # other tasks may be writing there
            run(tmp_path / "out", path, shard=0, shards=2, overwrite=True, **change)
        run(tmp_path / "out", path, overwrite=True, **change)
    assert len(stored(tmp_path / "out")) == len(GOOD)


def test_an_input_that_changed_since(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", GOOD)
    with parts_of(200):
        with pytest.raises(FileNotFoundError):
            run(tmp_path / "out", path, shard=0, shards=2)
        write_jsonl(tmp_path / "x.jsonl", [*GOOD, [1]])
        with pytest.raises(UserError, match="shards of another run: inputs"):
            run(tmp_path / "out", path)


def test_what_is_skipped_and_not_named_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").touch()
    path = write_jsonl(tmp_path / "x.jsonl", [*GOOD, *[[100]] * 12])
    manifest = run(tmp_path / "out", str(tmp_path / "empty.jsonl"), path, on_error="skip")
    printed = capsys.readouterr().out
    assert manifest["unreadable_inputs"] == 1 and "skipped: " + str(tmp_path / "empty.jsonl") in printed
    assert printed.count("skipped: ") == 11 and "skipped: 3 more; how many of which file" in printed
    assert len(stored(tmp_path / "out")) == len(GOOD)
