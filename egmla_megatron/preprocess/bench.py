"""The preprocessor beside Megatron-LM's and datatrove's, on the same file, as whole commands.

Every tool runs in its own process, in turn, n times. Outputs are compared byte by byte: a fast tool that writes
something else is not faster.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from egmla_megatron.data.index_file import write_index
from egmla_megatron.preprocess.measure import Run, run_command, spread

__all__ = ["Bench", "Peers"]

_TOOLS = Path(__file__).resolve().parents[2] / "tools"
_DATATROVE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import MegatronDocumentTokenizer
folder, name, out, tokenizer, tasks = sys.argv[1:]
if __name__ == "__main__":
    LocalPipelineExecutor(pipeline=[
        JsonlReader(folder, glob_pattern=name, text_key="text"),
        MegatronDocumentTokenizer(out, tokenizer_name_or_path=tokenizer, eos_token="<|endoftext|>", batch_size=1000),
    ], tasks=int(tasks), workers=int(tasks), logging_dir=out + "/logs").run()
"""


@dataclass(frozen=True)
class Peers:
    """Where the others are; empty: not measured."""

    megatron: str = ""  # Megatron-LM's tools/preprocess_data.py
    datatrove_python: str = ""  # an interpreter that has datatrove


class Bench:
    """Runs everything in a folder of its own; the tables go to the record."""

    def __init__(self, folder: Path, text: Path, tokenizer: Path, peers: Peers, *, n: int, workers: int) -> None:
        self.folder, self.text, self.tokenizer, self.peers = folder, text, tokenizer, peers
        self.n, self.workers = n, workers
        folder.mkdir(parents=True, exist_ok=True)
        with text.open("rb") as lines:
            (folder / "start.jsonl").write_bytes(b"".join(line for line, _ in zip(lines, range(4), strict=False)))

    def _ours(self, source: Path, out: Path, *more: str) -> list[str | Path]:
        fixed: list[str | Path] = ["--no-shuffle", "--validation-fraction", "0", "--overwrite", "--output-prefix", out]
        return [sys.executable, _TOOLS / "preprocess_data.py", "--input", source, *fixed, *more]

    def _text_commands(self, source: Path) -> dict[str, tuple[list[str | Path], Path]]:
        """Name -> (command, the .bin that it writes)."""
        workers, out = str(self.workers), self.folder
        ours = self._ours(source, out / "ours", "--tokenizer", str(self.tokenizer), "--workers", workers)
        commands: dict[str, tuple[list[str | Path], Path]] = {"ours": (ours, out / "ours.bin")}
        if self.peers.megatron:
            fixed = ["--tokenizer-type", "HuggingFaceTokenizer", "--append-eod", "--workers", workers]
            where: list[str | Path] = [
                "--input",
                source,
                "--output-prefix",
                out / "megatron",
                "--tokenizer-model",
                self.tokenizer,
            ]
            command: list[str | Path] = [sys.executable, self.peers.megatron, *where, *fixed]
            commands["megatron_lm"] = command, out / "megatron_text_document.bin"
        if self.peers.datatrove_python:
            script = out / "run_datatrove.py"
            script.write_text(_DATATROVE)
            target = out / f"datatrove{time.monotonic_ns()}"  # it takes a folder with logs for work already done
            command = [self.peers.datatrove_python, script, source.parent, source.name, target]
            commands["datatrove"] = [*command, self.tokenizer / "tokenizer.json", "1"], target / "00000_tokens.bin"
        return commands

    def text_table(self) -> dict[str, Any]:
        """Text to ids: all tools in turn, n times; start-up measured apart on four documents."""
        runs: dict[str, list[Run]] = {}
        start: dict[str, list[Run]] = {}
        same: dict[str, bool] = {}
        tokens = 0
        for _ in range(self.n):
            reference = b""
            for name, (command, _) in self._text_commands(self.folder / "start.jsonl").items():
                start.setdefault(name, []).append(run_command(command))
            for name, (command, written) in self._text_commands(self.text).items():
                runs.setdefault(name, []).append(run_command(command))
                content = written.read_bytes()
                reference, tokens = reference or content, len(content) // 2
                same[name] = content == reference
        table = {name: _rates(runs[name], start[name], tokens) | {"same_bytes_as_ours": same[name]} for name in runs}
        for name in table.keys() - {"ours"}:
            table[name]["ours_is_times_faster"] = {
                key: round(table["ours"][key]["median"] / table[name][key]["median"], 2)
                for key in ("tokens_per_s", "tokens_per_cpu_s", "tokens_per_cpu_s_without_start")
            }
        facts = {"input_bytes": self.text.stat().st_size, "tokens": tokens, "workers": self.workers, "n": self.n}
        return {**facts, "tools": table}

    def tokens_table(self, copies: int) -> dict[str, Any]:
        """Token lists to ids, one process: the text's own ids, `copies` times over, with ClimbMix's columns."""
        files = _write_token_lists(self.folder, copies)
        table = {}
        for name, path in files.items():
            runs = [
                run_command(self._ours(path, self.folder / f"from_{name}", "--workers", "1")) for _ in range(self.n)
            ]
            tokens = (self.folder / f"from_{name}.bin").stat().st_size // 2
            phases = [_phases(run.output) for run in runs]
            table[name] = {
                "tokens": tokens,
                "input_bytes": path.stat().st_size,
                "conversion_tokens_per_s": spread(tokens / found["parts"] for found in phases),
                "with_merge_tokens_per_s": spread(tokens / (found["parts"] + found["merging"]) for found in phases),
                "command_tokens_per_s": spread(tokens / run.wall_s for run in runs),
                "command_tokens_per_cpu_s": spread(tokens / run.cpu_s for run in runs),
                "peak_mib": spread(run.peak_mib for run in runs),
            }
        return {"processes": 1, "n": self.n, "files": table}

    def verify_table(self, size: int) -> dict[str, Any]:
        """verify_data.py --full beside a plain read of the same file, both with the file out of the page cache."""
        ids = np.fromfile(self.folder / "ours.bin", np.uint16)
        prefix = self.folder / "large"
        with Path(f"{prefix}.bin").open("wb") as out:
            for _ in range(max(1, size // ids.nbytes)):
                out.write(ids)
        tokens = Path(f"{prefix}.bin").stat().st_size // 2
        write_index(Path(f"{prefix}.idx"), np.full(tokens // 1000, 1000), np.dtype(np.uint16))
        with Path(f"{prefix}.bin").open("r+b") as out:
            out.truncate(tokens // 1000 * 2000)
        _write_manifest(prefix, tokens // 1000)
        timed: dict[str, Callable[[], None]] = {"plain_read": lambda: _read(prefix), "verify": lambda: _verify(prefix)}
        rates: dict[str, list[float]] = {name: [] for name in timed}
        for _ in range(self.n):
            for name, action in timed.items():
                _forget(prefix)
                started = time.perf_counter()
                action()
                rates[name].append(tokens * 2 / (time.perf_counter() - started) / 1e6)
        return {"bytes": tokens * 2, "n": self.n, "mb_per_s": {name: spread(found) for name, found in rates.items()}}


def _rates(runs: list[Run], start: list[Run], tokens: int) -> dict[str, Any]:
    idle = statistics.median(run.cpu_s for run in start)
    return {
        "wall_s": spread(run.wall_s for run in runs),
        "cpu_s": spread(run.cpu_s for run in runs),
        "start_cpu_s": spread(run.cpu_s for run in start),
        "tokens_per_s": spread(tokens / run.wall_s for run in runs),
        "tokens_per_cpu_s": spread(tokens / run.cpu_s for run in runs),
        "tokens_per_cpu_s_without_start": spread(tokens / (run.cpu_s - idle) for run in runs),
        "peak_mib_of_largest_process": spread(run.peak_mib for run in runs),
    }


def _phases(output: str) -> dict[str, float]:
    return {name: float(spent) for name, spent in re.findall(r"(parts|merging) ([\d.]+) s", output)}


def _write_token_lists(folder: Path, copies: int) -> dict[str, Path]:
    """ClimbMix's columns as parquet and jsonl, from the documents of the text run."""
    import orjson
    import pyarrow as pa
    import pyarrow.parquet as pq

    raw = Path(folder / "ours.idx").read_bytes()
    count = int.from_bytes(raw[18:26], "little")
    lengths = np.tile(np.frombuffer(raw, "<i4", count, 34), copies)
    ids = np.tile(np.fromfile(folder / "ours.bin", np.uint16), copies).astype(np.int64)
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    clusters = np.arange(len(lengths)) % 20
    lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))
    table = pa.table({"cluster_id": pa.array(clusters), "tokens": lists, "token_count": pa.array(lengths, pa.int64())})
    files = {"parquet": folder / "ids.parquet", "jsonl": folder / "ids.jsonl"}
    pq.write_table(table, files["parquet"], row_group_size=1000)  # as the datasets library writes
    with files["jsonl"].open("wb") as out:
        for cluster, first, last in zip(clusters.tolist(), offsets.tolist(), offsets[1:].tolist(), strict=False):
            row = {"cluster_id": cluster, "tokens": ids[first:last].tolist(), "token_count": last - first}
            out.write(orjson.dumps(row) + b"\n")
    return files


def _write_manifest(prefix: Path, documents: int) -> None:
    from egmla_megatron.data.verify import MANIFEST_FORMAT, sha256_of

    files = {suffix: Path(f"{prefix}.{suffix}") for suffix in ("bin", "idx")}
    manifest = {
        "format": MANIFEST_FORMAT,
        "tokens": documents * 1000,
        "documents": documents,
        "dtype": "uint16",
        "vocab_size": 50_257,
        "eod_id": 50_256,
        "sha256": {suffix: sha256_of(path) for suffix, path in files.items()},
        "bytes": {suffix: path.stat().st_size for suffix, path in files.items()},
    }
    Path(f"{prefix}.json").write_text(json.dumps(manifest))


def _forget(prefix: Path) -> None:
    """Writes the file back and drops it from the page cache."""
    with Path(f"{prefix}.bin").open("r+b") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(prefix: Path) -> None:
    buffer = bytearray(16 << 20)
    with Path(f"{prefix}.bin").open("rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass


def _verify(prefix: Path) -> None:
    from egmla_megatron.data.verify import verify_prefix

    verify_prefix(prefix, full=True)
