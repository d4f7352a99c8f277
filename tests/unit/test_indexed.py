"""Indexed data: byte-identical to megatron-core's own builder, and every kind of damage is named."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from egmla_megatron.data import verify
from egmla_megatron.data.indexed import verify_prefix, write_texts, write_tokens
from egmla_megatron.data.tokenizer import Tokenizer
from egmla_megatron.errors import UserError

DOCUMENTS = [[5, 6, 7, 1], [8, 1], [9, 10, 11, 12, 1]]
SEQUENCES_AT, LENGTHS_AT = 18, 34  # bytes in the index
OFFSETS_AT = LENGTHS_AT + 4 * len(DOCUMENTS)
MARKS_AT = OFFSETS_AT + 8 * len(DOCUMENTS)


def write(prefix: Path, vocab_size: int = 20, documents: Any = DOCUMENTS) -> dict[str, Any]:
    return write_tokens(
        prefix, documents, vocab_size=vocab_size, eod_id=1, tokenizer="t", tokenizer_sha256="0", source="test"
    )


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write(tmp_path / "data")
    return tmp_path / "data"


@pytest.mark.parametrize(("vocab_size", "dtype"), [(20, np.uint16), (70_000, np.int32)])
def test_bytes_equal_megatrons_builder(tmp_path: Path, vocab_size: int, dtype: Any) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    documents = [[*document, vocab_size - 1] for document in DOCUMENTS]
    manifest = write(tmp_path / "ours", vocab_size, documents)
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for document in documents:
        builder.add_item(torch.tensor(document))
        builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()
    assert (manifest["tokens"], manifest["documents"], manifest["dtype"]) == (14, 3, np.dtype(dtype).name)
    assert sorted(path.name for path in tmp_path.glob("ours*")) == ["ours.bin", "ours.idx", "ours.json"]
    info = verify_prefix(tmp_path / "theirs", vocab_size=vocab_size, full=True)  # no manifest needed
    assert (info.tokens, info.documents, info.manifest, info.eod_id) == (14, 3, None, None)


def test_megatron_reads_it_back(prefix: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    assert [dataset[index].tolist() for index in range(len(dataset))] == DOCUMENTS
    assert verify_prefix(prefix, vocab_size=20, full=True).eod_id == 1


def test_texts_end_with_the_document_token(tmp_path: Path) -> None:
    class Bytes(Tokenizer):
        def encode(self, text: str) -> list[int]:
            return list(text.encode())

        def decode(self, ids: Sequence[int]) -> str:
            return bytes(ids).decode()

    tokenizer = Bytes(kind="bytes", name="bytes", sha256="0", eod=256, vocab_size=257)
    manifest = write_texts(tmp_path / "text", ["ab", "", "c"], tokenizer, source="test")
    assert np.fromfile(tmp_path / "text.bin", dtype=np.uint16).tolist() == [97, 98, 256, 99, 256]
    assert (manifest["documents"], manifest["eod_id"]) == (2, 256)


@pytest.mark.parametrize("document", [[3, 20], [3, -1], [3, 65_536 + 3], []])
def test_ids_that_do_not_fit_are_refused_and_nothing_is_left(tmp_path: Path, document: list[int]) -> None:
    with pytest.raises(UserError, match="document 1"):
        write(tmp_path / "data", documents=[[1, 2], document])
    assert not list(tmp_path.iterdir())


def test_failed_rewrite_keeps_the_old_data_set(prefix: Path) -> None:
    with pytest.raises(UserError, match="got no documents"):
        write(prefix, documents=[])
    assert verify_prefix(prefix, full=True).tokens == 11


def patched(suffix: str, offset: int, content: bytes) -> Callable[[Path], None]:
    def damage(prefix: Path) -> None:
        path = Path(f"{prefix}.{suffix}")
        raw = bytearray(path.read_bytes())
        raw[offset : offset + len(content)] = content
        path.write_bytes(raw)

    return damage


def cut(suffix: str, by: int) -> Callable[[Path], None]:
    def damage(prefix: Path) -> None:
        path = Path(f"{prefix}.{suffix}")
        path.write_bytes(path.read_bytes()[:-by])

    return damage


def removed(suffix: str) -> Callable[[Path], None]:
    return lambda prefix: Path(f"{prefix}.{suffix}").unlink()


def manifest_with(key: str, value: Any) -> Callable[[Path], None]:
    def damage(prefix: Path) -> None:
        path = Path(f"{prefix}.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))

    return damage


CHEAP = {
    "no bin": (removed("bin"), r"data\.bin: missing"),
    "no idx": (removed("idx"), r"data\.idx: missing"),
    "magic": (patched("idx", 0, b"X"), "magic: got"),
    "version": (patched("idx", 9, struct.pack("<Q", 2)), "version: got 2, expected 1"),
    "unknown dtype": (patched("idx", 17, b"\x09"), "dtype code: got 9"),
    "float dtype": (patched("idx", 17, b"\x06"), "dtype code: got 6"),
    "wider dtype": (patched("idx", 17, b"\x04"), "offset of sequence 1: got 8, expected 16"),
    "sequence count": (patched("idx", SEQUENCES_AT, struct.pack("<Q", 4)), r"idx: file size: got \d+, expected"),
    "no sequences": (patched("idx", SEQUENCES_AT, struct.pack("<Q", 0)), "it is empty"),
    "short header": (lambda prefix: Path(f"{prefix}.idx").write_bytes(b"MMIDIDX"), "file size: got 7"),
    "cut idx": (cut("idx", 8), "idx: file size"),
    "empty sequence": (patched("idx", LENGTHS_AT + 4, struct.pack("<i", 0)), "length of sequence 1: got 0"),
    "negative length": (patched("idx", LENGTHS_AT, struct.pack("<i", -4)), "length of sequence 0: got -4"),
    "offset": (patched("idx", OFFSETS_AT + 16, struct.pack("<q", 6)), "offset of sequence 2: got 6, expected 12"),
    "first mark": (patched("idx", MARKS_AT, struct.pack("<q", 1)), "first and last document mark"),
    "falling marks": (patched("idx", MARKS_AT + 8, struct.pack("<qq", 2, 1)), "document mark 2: got 1"),
    "cut bin": (cut("bin", 2), r"bin: file size: got 20, expected 22 bytes"),
    "manifest syntax": (lambda prefix: Path(f"{prefix}.json").write_text("{"), "json: not valid JSON"),
    "manifest format": (manifest_with("format", "other"), "format: got other"),
    "manifest tokens": (manifest_with("tokens", 10), "tokens: got 10, expected 11"),
    "manifest documents": (manifest_with("documents", 4), "documents: got 4, expected 3"),
    "manifest dtype": (manifest_with("dtype", "int32"), "dtype: got int32, expected uint16"),
    "manifest eod": (manifest_with("eod_id", None), "eod_id: got None"),
    "manifest eod range": (manifest_with("eod_id", 20), "eod_id: got 20, expected 0 to 19"),
}
FULL = {
    "id beyond the vocabulary": (patched("bin", 6, struct.pack("<H", 20)), r"id of token 3: got 20, expected 0 to 19"),
    "changed token": (patched("bin", 6, struct.pack("<H", 3)), r"bin: sha256: got"),
}


@pytest.mark.parametrize(("damage", "message"), CHEAP.values(), ids=CHEAP.keys())
def test_cheap_check_finds(prefix: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(prefix)
    with pytest.raises(UserError, match=message):
        verify_prefix(prefix)


@pytest.mark.parametrize(("damage", "message"), FULL.values(), ids=FULL.keys())
def test_full_check_finds(prefix: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(prefix)
    verify_prefix(prefix)  # the cheap check does not read tokens
    with pytest.raises(UserError, match=message):
        verify_prefix(prefix, full=True)


def test_sample_finds_ids_at_both_ends_and_reads_no_checksums(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_SAMPLES", 2)
    monkeypatch.setattr(verify, "_SAMPLE_TOKENS", 2)
    patched("bin", 2 * 5, struct.pack("<H", 20))(prefix)
    assert verify_prefix(prefix, sample=True).tokens == 11  # token 5 is in no sample
    for position in (0, 10):
        patched("bin", 2 * position, struct.pack("<H", 20))(prefix)
        with pytest.raises(UserError, match=rf"id of token {position}: got 20, expected 0 to 19"):
            verify_prefix(prefix, sample=True)
        patched("bin", 2 * position, struct.pack("<H", 1))(prefix)


def test_negative_ids_are_found_with_and_without_a_limit(tmp_path: Path) -> None:
    write(tmp_path / "data", 70_000)
    patched("bin", 4 * 3, struct.pack("<i", -2))(tmp_path / "data")
    with pytest.raises(UserError, match=r"id of token 3: got -2, expected 0 to 69999"):
        verify_prefix(tmp_path / "data", full=True)
    removed("json")(tmp_path / "data")
    for depth in ("full", "sample"):
        with pytest.raises(UserError, match=r"id of token 3: got -2, expected at least 0"):
            verify_prefix(tmp_path / "data", **{depth: True})


def test_full_check_reads_in_many_chunks(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_CHUNK", 4)
    verify_prefix(prefix, full=True)
    patched("bin", 2 * 7, struct.pack("<H", 21))(prefix)
    with pytest.raises(UserError, match=r"id of token 7: got 21"):
        verify_prefix(prefix, full=True)


def test_vocabulary_of_the_model_is_too_small(prefix: Path) -> None:
    with pytest.raises(UserError, match=r"vocab_size: got 20, expected at most model\.vocab_size 12"):
        verify_prefix(prefix, vocab_size=12)
    removed("json")(prefix)
    with pytest.raises(UserError, match=r"id of token 9: got 12, expected 0 to 11"):
        verify_prefix(prefix, vocab_size=12, full=True)


def test_command_line(prefix: Path) -> None:
    tool = Path(__file__).resolve().parents[2] / "tools" / "verify_data.py"
    good = subprocess.run([sys.executable, tool, prefix, "--full"], capture_output=True, text=True, timeout=60)
    assert (good.returncode, good.stdout) == (0, f"{prefix}: ok, 11 tokens, 3 documents, uint16, with manifest\n")
    cut("bin", 2)(prefix)
    bad = subprocess.run([sys.executable, tool, prefix], capture_output=True, text=True, timeout=60)
    assert bad.returncode == 2 and bad.stderr.startswith("error: ") and bad.stderr.count("\n") == 1
