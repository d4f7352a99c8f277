"""From complete parts to the data sets PREFIX, PREFIX_val and, by option, PREFIX_cluster<N>, with their manifests."""

from __future__ import annotations

import glob
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from egmla_megatron.data.index_file import write_index
from egmla_megatron.data.indexed import move_into_place
from egmla_megatron.data.verify import MANIFEST_FORMAT, sha256_of
from egmla_megatron.errors import UserError
from egmla_megatron.preprocess.assemble import assemble
from egmla_megatron.preprocess.options import Options
from egmla_megatron.preprocess.part import read_record
from egmla_megatron.preprocess.plan import Plan
from egmla_megatron.preprocess.rows import MAX_EXAMPLES, NO_CLUSTER
from egmla_megatron.preprocess.select import Catalogue, Selection, load_catalogue, select

__all__ = ["MOVING", "merge_parts", "merge_settings", "prefix_of", "written_prefixes"]

MOVING = "moving"  # this file in the folder of parts says: outputs are being renamed, old ones may be gone; it holds
# the merge settings that they are of
BLOCK_TOKENS = 8192  # a micro-batch's worth: distinct ids among so many decide the cost of the gating tables
_SAMPLED_BLOCKS = 256


@dataclass(frozen=True)
class _Output:
    prefix: Path
    order_D: np.ndarray


def prefix_of(output: Path, split: str) -> Path:
    """OUTPUT, OUTPUT_val, OUTPUT_cluster7 for split "", "val", "cluster7"."""
    return output.with_name(output.name + (f"_{split}" if split else ""))


def written_prefixes(output: Path) -> list[Path]:
    """Prefixes of this output of which any file exists."""
    found = (file.with_suffix("") for file in output.parent.glob(f"{glob.escape(output.name)}_cluster*.idx"))
    candidates = {file for file in found if re.fullmatch(r"_cluster-?\d+", file.name.removeprefix(output.name))}
    candidates |= {prefix_of(output, ""), prefix_of(output, "val")}
    return sorted(p for p in candidates if any(Path(f"{p}.{suffix}").exists() for suffix in ("bin", "idx", "json")))


def merge_settings(options: Options) -> dict[str, Any]:
    """Options that decide the outputs beyond what the parts hold."""
    names = ("shuffle", "seed", "validation_fraction", "dedupe", "by_cluster")
    return {name: getattr(options, name) for name in names}


def merge_parts(
    plan: Plan, options: Options, folder: Path, skipped: list[str], progress: Callable[[int], object]
) -> dict[str, Any]:
    """Writes everything under temporary names in `folder`, then renames. Returns the manifest of the training data.

    progress: called with bytes written. UserError when no document is left.
    """
    catalogue = load_catalogue(folder, len(plan.parts))
    chosen = select(catalogue, options)
    if not len(chosen.train_D):
        raise UserError(
            f"--input: {len(catalogue.lengths_D)} documents, of which none is left for training ({len(chosen.valid_D)} "
            f"validation, {chosen.duplicates} duplicates), needed at least one; give more text or a smaller "
            "--validation-fraction"
        )
    shared = {**_shared_facts(plan, options), **_input_facts(plan, folder, skipped)}
    shared["preprocess"].update(duplicates_dropped=chosen.duplicates, distinct_ids=catalogue.distinct_ids)
    manifests = {}
    for split, output in _outputs(options, catalogue, chosen).items():
        manifests[split] = _write(plan, folder, catalogue, output, split, shared, progress)
    (folder / MOVING).write_text(json.dumps(merge_settings(options)), encoding="utf-8")
    for old in written_prefixes(options.output):
        Path(f"{old}.json").unlink(missing_ok=True)
    written = {prefix_of(options.output, split) for split in manifests}
    for old in set(written_prefixes(options.output)) - written:
        for suffix in ("idx", "bin"):
            Path(f"{old}.{suffix}").unlink(missing_ok=True)
    for split in sorted(manifests, reverse=True):  # the training data set, "", comes last
        partial = {suffix: folder / f"out{split}.{suffix}" for suffix in ("bin", "idx", "json")}
        move_into_place(str(prefix_of(options.output, split)), partial)
    return manifests[""]


def _outputs(options: Options, catalogue: Catalogue, chosen: Selection) -> dict[str, _Output]:
    orders = {"": chosen.train_D}
    if len(chosen.valid_D):
        orders["val"] = chosen.valid_D
    if options.by_cluster:
        clusters_D = catalogue.clusters_D[chosen.train_D]
        for cluster in np.unique(clusters_D[clusters_D != NO_CLUSTER]).tolist():
            orders[f"cluster{cluster}"] = chosen.train_D[clusters_D == cluster]
    return {split: _Output(prefix_of(options.output, split), order) for split, order in orders.items()}


def _write(
    plan: Plan,
    folder: Path,
    catalogue: Catalogue,
    output: _Output,
    split: str,
    shared: dict[str, Any],
    progress: Callable[[int], object],
) -> dict[str, Any]:
    """One data set under temporary names; returns its manifest."""
    lengths_D, dtype = catalogue.lengths_D[output.order_D], plan.vocabulary.dtype
    paths = {suffix: folder / f"out{split}.{suffix}" for suffix in ("bin", "idx", "json")}
    digest = assemble(paths["bin"], folder, catalogue, output.order_D, dtype, progress)
    write_index(paths["idx"], lengths_D, dtype)
    manifest = {
        "format": MANIFEST_FORMAT,
        "tokens": int(lengths_D.sum()),
        "documents": len(lengths_D),
        "vocab_size": plan.vocabulary.size,
        "dtype": dtype.name,
        "eod_id": plan.vocabulary.eos_id,
        "tokenizer": plan.vocabulary.tokenizer,
        "tokenizer_sha256": plan.vocabulary.sha256,
        "source": f"{len(plan.sources)} input files",
        "split": split or "train",
        "sha256": {"bin": digest, "idx": sha256_of(paths["idx"])},
        "bytes": {suffix: paths[suffix].stat().st_size for suffix in ("bin", "idx")},
        "longest_document": int(lengths_D.max()),
        "unique_fraction_of_8192": _unique_fraction(paths["bin"], dtype),
        "clusters": dict(_cluster_counts(catalogue, output.order_D)),
        **shared,
    }
    paths["json"].write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def _unique_fraction(path: Path, dtype: np.dtype) -> float:
    """Mean share of distinct ids in up to 256 evenly spaced blocks of 8192 tokens (one shorter block when short)."""
    tokens_T = np.memmap(path, mode="r", dtype=dtype)
    blocks = len(tokens_T) // BLOCK_TOKENS
    if not blocks:
        return round(len(np.unique(tokens_T)) / len(tokens_T), 4)
    chosen = np.unique(np.linspace(0, blocks - 1, min(blocks, _SAMPLED_BLOCKS)).astype(int)).tolist()
    shares = [len(np.unique(tokens_T[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS])) / BLOCK_TOKENS for i in chosen]
    return round(float(np.mean(shares)), 4)


def _cluster_counts(catalogue: Catalogue, order_D: np.ndarray) -> Iterator[tuple[str, dict[str, int]]]:
    """Documents and tokens of each cluster, for blends; nothing where the input has none."""
    clusters_D, lengths_D = catalogue.clusters_D[order_D], catalogue.lengths_D[order_D]
    names, inverse = np.unique(clusters_D, return_inverse=True)
    documents = np.bincount(inverse)
    tokens = np.zeros(len(names), np.int64)
    np.add.at(tokens, inverse, lengths_D)
    for name, count, total in zip(names.tolist(), documents.tolist(), tokens.tolist(), strict=True):
        if name != NO_CLUSTER:
            yield str(name), {"documents": count, "tokens": total}


def _shared_facts(plan: Plan, options: Options) -> dict[str, Any]:
    return {
        "preprocess": {
            "plan": plan.digest,
            **merge_settings(options),
            "append_eos": plan.append_eos,
            "on_error": plan.on_error,
            "validation_rule": "first 64 bits of xxh3-128 of the stored ids without the end-of-document id, "
            "below validation_fraction * 2^64",
        }
    }


def _input_facts(plan: Plan, folder: Path, skipped: list[str]) -> dict[str, Any]:
    """Counts of every input file, and the first faults."""
    counts: list[Counter[str]] = [Counter() for _ in plan.sources]
    examples = list(skipped)
    for part in plan.parts:
        record = read_record(folder, part.number)
        assert record is not None, f"part {part.number} is complete"
        for number, found in record["sources"].items():
            counts[int(number)].update(found)
        examples += record["examples"]
    inputs = [
        {**source.record(), **found, "end_of_document": _ending(found)}
        for source, found in zip(plan.sources, counts, strict=True)
    ]
    return {"inputs": inputs, "unreadable_inputs": len(skipped), "faults": examples[:MAX_EXAMPLES]}


def _ending(counts: Counter[str]) -> str:
    """How the rows of a token list ended before they were normalised."""
    found = (bool(counts["with_eos"]), bool(counts["without_eos"]))
    return {(True, False): "present", (False, True): "absent", (True, True): "mixed", (False, False): "none"}[found]
