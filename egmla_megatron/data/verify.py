"""Checks of an indexed data set before anything reads it.

megatron-core trusts its files: a .bin that is too short, a wrong dtype code or ids beyond the vocabulary give
silent garbage. The cheap checks read the index only and run before every start; the full ones read every token.

Layout of a .idx file (little endian): 9 bytes magic, u64 version, u8 dtype code, u64 sequences, u64 document marks,
i32 length of each sequence (tokens), i64 offset of each sequence (bytes), i64 sequence number at each document mark.
"""

from __future__ import annotations

import hashlib
import json
import struct
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from egmla_megatron.errors import UserError

__all__ = ["DTYPE_CODES", "MAGIC", "MANIFEST_FORMAT", "DatasetInfo", "sha256_of", "verify_prefix"]

MAGIC = b"MMIDIDX\x00\x00"
MANIFEST_FORMAT = "mmididx-1"
DTYPE_CODES = {4: "int32", 5: "int64", 8: "uint16"}
_HEADER = struct.Struct("<9sQBQQ")
_CHUNK = 1 << 24  # bytes read at a time
_SAMPLES, _SAMPLE_TOKENS = 64, 1 << 20


@dataclass(frozen=True)
class DatasetInfo:
    """What the index (and the manifest, where there is one) say."""

    prefix: str
    tokens: int
    sequences: int
    documents: int
    dtype: str
    manifest: dict[str, Any] | None

    @property
    def eod_id(self) -> int | None:
        """End-of-document id of the manifest, None without one."""
        return None if self.manifest is None else int(self.manifest["eod_id"])


def sha256_of(path: Path) -> str:
    """Hex digest of a file, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def verify_prefix(
    prefix: str | Path, *, vocab_size: int | None = None, full: bool = False, sample: bool = False
) -> DatasetInfo:
    """Checks PREFIX.bin, PREFIX.idx and, when it is there, PREFIX.json; UserError names file, fault and cure.

    vocab_size: rows of the model's embedding. full: read all tokens (range) and compare checksums. sample: check the
    ids of evenly spaced blocks, at most 64 million tokens, and no checksums.
    """
    bin_path, idx_path, manifest_path = (Path(f"{prefix}.{suffix}") for suffix in ("bin", "idx", "json"))
    for path in (bin_path, idx_path):
        if not path.is_file():
            raise UserError(f"{path}: missing, expected it beside its pair of .bin and .idx; check the prefix")
    info = _check_index(str(prefix), idx_path, bin_path.stat().st_size)
    manifest = _check_manifest(manifest_path, info, bin_path, idx_path) if manifest_path.exists() else None
    info = DatasetInfo(info.prefix, info.tokens, info.sequences, info.documents, info.dtype, manifest)
    if manifest is not None and vocab_size is not None and manifest["vocab_size"] > vocab_size:
        expected = f"at most model.vocab_size {vocab_size}"
        _fail(
            manifest_path, "vocab_size", manifest["vocab_size"], expected, "enlarge model.vocab_size or use other data"
        )
    limits = [] if vocab_size is None else [vocab_size]
    if manifest is not None:
        limits.append(int(manifest["vocab_size"]))
    limit = min(limits) if limits else None
    if full:
        sums = None if manifest is None else _recorded_sums(manifest_path, manifest)
        if sums is not None:
            _compare(idx_path, sha256_of(idx_path), sums["idx"])
        _check_everything(bin_path, info, limit, None if sums is None else sums["bin"])
    elif sample:
        _check_sample(bin_path, info, limit)
    return info


def _recorded_sums(path: Path, manifest: dict[str, Any]) -> dict[str, str]:
    sums = manifest.get("sha256")
    if not isinstance(sums, dict) or not {"bin", "idx"} <= sums.keys():
        _fail(path, "sha256", sums, "sums of bin and idx")
    return sums


def _fail(path: Path, what: str, got: object, expected: object, cure: str = "write the data set again") -> NoReturn:
    raise UserError(f"{path}: {what}: got {got}, expected {expected}; {cure}")


def _check_index(prefix: str, path: Path, bin_bytes: int) -> DatasetInfo:
    size = path.stat().st_size
    if size < _HEADER.size:
        _fail(path, "file size", size, f"at least {_HEADER.size} bytes")
    with path.open("rb") as stream:
        magic, version, code, sequences, marks = _HEADER.unpack(stream.read(_HEADER.size))
    if magic != MAGIC:
        _fail(path, "magic", magic, MAGIC, "this is no index of megatron-core")
    if version != 1:
        _fail(path, "version", version, 1)
    if code not in DTYPE_CODES:
        _fail(path, "dtype code", code, f"one of {DTYPE_CODES}")
    if sequences == 0 or marks < 2:
        _fail(path, "sequences and document marks", f"{sequences} and {marks}", "at least 1 and 2, it is empty")
    expected = _HEADER.size + 12 * sequences + 8 * marks
    if size != expected:
        _fail(path, "file size", size, f"{expected} bytes for {sequences} sequences and {marks} document marks")
    raw = np.memmap(path, mode="r", dtype=np.uint8, offset=_HEADER.size)
    lengths = raw[: 4 * sequences].view("<i4")
    offsets = raw[4 * sequences : 12 * sequences].view("<i8")
    documents = raw[12 * sequences :].view("<i8")
    itemsize = np.dtype(DTYPE_CODES[code]).itemsize
    _check_arrays(path, lengths, offsets, documents, itemsize)
    tokens = int(lengths.sum(dtype=np.int64))
    if bin_bytes != tokens * itemsize:
        cure = "the file is cut off or not of this index: copy or write it again"
        _fail(path.with_suffix(".bin"), "file size", bin_bytes, f"{tokens * itemsize} bytes for {tokens} tokens", cure)
    return DatasetInfo(prefix, tokens, sequences, marks - 1, DTYPE_CODES[code], None)


def _check_arrays(path: Path, lengths: np.ndarray, offsets: np.ndarray, documents: np.ndarray, itemsize: int) -> None:
    """Lengths are positive, offsets contiguous, document marks rise from 0 to the number of sequences."""
    if lengths.min() <= 0:
        first = int(np.argmax(lengths <= 0))
        _fail(path, f"length of sequence {first}", int(lengths[first]), "at least 1 token")
    ends = np.cumsum(lengths, dtype=np.int64) * itemsize
    starts = np.concatenate(([0], ends[:-1]))
    if not np.array_equal(starts, offsets):
        first = int(np.argmax(starts != offsets))
        _fail(path, f"offset of sequence {first}", int(offsets[first]), int(starts[first]))
    if documents[0] != 0 or documents[-1] != len(lengths):
        _fail(path, "first and last document mark", (int(documents[0]), int(documents[-1])), (0, len(lengths)))
    if (np.diff(documents) < 0).any():
        first = int(np.argmax(np.diff(documents) < 0)) + 1
        _fail(path, f"document mark {first}", int(documents[first]), f"at least {int(documents[first - 1])}")


def _check_manifest(path: Path, info: DatasetInfo, bin_path: Path, idx_path: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); write the data set again") from error
    expected = {
        "format": MANIFEST_FORMAT,
        "tokens": info.tokens,
        "documents": info.documents,
        "dtype": info.dtype,
        "bytes": {"bin": bin_path.stat().st_size, "idx": idx_path.stat().st_size},
    }
    for key, value in expected.items():
        if manifest.get(key) != value:
            _fail(path, key, manifest.get(key), value)
    for key in ("vocab_size", "eod_id"):
        if not isinstance(manifest.get(key), int):
            _fail(path, key, manifest.get(key), "a whole number")
    if not 0 <= manifest["eod_id"] < manifest["vocab_size"]:
        allowed = f"0 to {manifest['vocab_size'] - 1}"
        _fail(path, "eod_id", manifest["eod_id"], allowed, "use a tokenizer with an end-of-document token")
    return manifest


def _check_sample(path: Path, info: DatasetInfo, limit: int | None) -> None:
    """Ids of up to _SAMPLES evenly spaced blocks, the first and the last among them."""
    tokens = np.memmap(path, mode="r", dtype=np.dtype(info.dtype).newbyteorder("<"))
    last = max(0, info.tokens - _SAMPLE_TOKENS)
    for start in np.unique(np.linspace(0, last, _SAMPLES).astype(np.int64)).tolist():
        _check_ids(path, tokens[start : start + _SAMPLE_TOKENS], start, limit)


def _check_everything(path: Path, info: DatasetInfo, limit: int | None, wanted: str | None) -> None:
    """Reads the .bin once: ids in this thread, the checksum (where one is wanted) in another."""
    from tqdm import tqdm

    digest = hashlib.sha256()
    itemsize = np.dtype(info.dtype).itemsize
    start = 0
    with (
        path.open("rb", buffering=0) as stream,
        ThreadPoolExecutor(1) as thread,
        tqdm(total=path.stat().st_size, unit="B", unit_scale=True, desc=f"reading {path.name}", disable=None) as bar,
    ):
        pending: Future[None] | None = None
        filled, next_one = memoryview(bytearray(_CHUNK)), memoryview(bytearray(_CHUNK))
        while size := _fill(stream, filled):
            chunk = filled[:size]
            if pending is not None:
                pending.result()
            pending = thread.submit(digest.update, chunk) if wanted is not None else None
            _check_ids(path, np.frombuffer(chunk, np.dtype(info.dtype).newbyteorder("<")), start, limit)
            start += size // itemsize
            bar.update(size)
            filled, next_one = next_one, filled  # the other one was hashed before this one's turn came
        if pending is not None:
            pending.result()
    if wanted is not None:
        _compare(path, digest.hexdigest(), wanted)


def _fill(stream: FileIO, buffer: memoryview) -> int:
    """Bytes read: all of the buffer but at the file's end. A network disk may give less at a time, even odd numbers."""
    filled = 0
    while filled < len(buffer) and (count := stream.readinto(buffer[filled:])):
        filled += count
    return filled


def _check_ids(path: Path, chunk: np.ndarray, start: int, limit: int | None) -> None:
    """Negative ids are the largest when read as unsigned: one comparison finds both faults."""
    unsigned = chunk.view(f"<u{chunk.dtype.itemsize}")
    bound = limit if limit is not None else 1 << (8 * chunk.dtype.itemsize - (chunk.dtype.kind == "i"))
    if len(chunk) and int(unsigned.max()) >= bound:
        first = int(np.argmax(unsigned >= bound))
        allowed = "at least 0" if limit is None else f"0 to {limit - 1}"
        _fail(path, f"id of token {start + first}", int(chunk[first]), allowed, "use the tokenizer of the model")


def _compare(path: Path, found: str, recorded: str | None) -> None:
    if recorded != found:
        cure = "the file changed: write or copy it again"
        _fail(path, "sha256", found, f"{recorded} (in {path.with_suffix('.json').name})", cure)
