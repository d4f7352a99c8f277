"""What `data.train` and `data.valid` name, read without torch or megatron-core: checks must be quick."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from egmla_megatron.config.schema import RunConfig
from egmla_megatron.errors import UserError

__all__ = ["check_blends", "parse_blend", "refuse_suffix", "resolve_eod", "tokenizer_sha256"]

_MOST_SAMPLES = 2**31 - 1  # of a run on weighted data; 21 GB of index on every rank


def parse_blend(entries: Sequence[str], key: str) -> tuple[list[str], list[float] | None]:
    """`(prefix, ...)` or `(weight, prefix, weight, prefix, ...)` -> (prefixes, weights or None).

    Raises:
        UserError: a weight is missing, or not positive.
    """

    def number(text: str) -> float | None:
        try:
            return float(text)
        except ValueError:
            return None

    weights = [number(entry) for entry in entries[0::2]]
    if not entries or all(number(entry) is None for entry in entries):
        return list(entries), None
    bad = len(entries) % 2 or any(w is None or not math.isfinite(w) or w <= 0 for w in weights)
    if bad or any(number(entry) is not None for entry in entries[1::2]):
        raise UserError(
            f"{key}: got {list(entries)}, allowed [prefix, ...] or [weight, prefix, weight, prefix, ...] with "
            "positive weights; give every prefix a weight or none"
        )
    return list(entries[1::2]), [float(w) for w in weights if w is not None]


def refuse_suffix(prefix: str, key: str) -> None:
    """Refuse the name of a file where a prefix is wanted.

    Raises:
        UserError: `prefix` ends in .bin or .idx and is not itself the prefix of a data set.
    """
    path = Path(prefix)
    if path.suffix in (".bin", ".idx") and not Path(f"{prefix}.idx").is_file():
        raise UserError(
            f"{key}: got {prefix}, allowed the prefix of a data set, without .bin and .idx; drop the suffix: "
            f"{path.with_suffix('')}"
        )


def check_blends(cfg: RunConfig) -> None:
    """What the two lists of data may not say. Reads no data.

    Raises:
        UserError: names the list.
    """
    for key, entries in (("data.train", cfg.data.train), ("data.valid", cfg.data.valid)):
        prefixes, weights = parse_blend(entries, key)
        for prefix in prefixes:
            refuse_suffix(prefix, key)
        if weights is None or key == "data.valid":
            continue
        samples = cfg.total_steps * cfg.train.global_batch_size
        if samples > _MOST_SAMPLES:
            raise UserError(
                f"train.steps: got {cfg.total_steps} steps of {cfg.train.global_batch_size} sequences on data with "
                f"weights, allowed {_MOST_SAMPLES} sequences in all (each is drawn beforehand); train shorter, or "
                "drop the weights of data.train"
            )


def resolve_eod(cfg: RunConfig) -> int:
    """End-of-document id: `data.eod_id`, or what the manifests of the training data agree on.

    Raises:
        UserError: no manifest names one, or they differ.
    """
    if cfg.data.eod_id >= 0:
        return cfg.data.eod_id
    prefixes, _ = parse_blend(cfg.data.train, "data.train")
    found = _in_manifests(prefixes, "eod_id")
    ids = set(found.values())
    if len(ids) != 1 or None in ids or len(found) < len(prefixes):
        raise UserError(
            f"data.eod_id: the end-of-document id is not known (manifests say {found or 'nothing'}); "
            "set data.eod_id=N, 50256 for GPT-2 tokens"
        )
    return int(ids.pop())


def tokenizer_sha256(cfg: RunConfig) -> str | None:
    """Checksum of the tokenizer that wrote the training data; None unless the manifests of all of it know the same."""
    prefixes, _ = parse_blend(cfg.data.train, "data.train")
    found = _in_manifests(prefixes, "tokenizer_sha256")
    sums = set(found.values())
    return sums.pop() or None if len(sums) == 1 and len(found) == len(prefixes) else None


def _in_manifests(prefixes: Sequence[str], key: str) -> dict[str, Any]:
    """Prefix -> what its manifest says; those without a manifest are left out."""
    manifests = {prefix: Path(f"{prefix}.json") for prefix in prefixes}
    return {
        prefix: json.loads(path.read_text(encoding="utf-8")).get(key)
        for prefix, path in manifests.items()
        if path.is_file()
    }
