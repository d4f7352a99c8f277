"""What the user reads: inputs at the start, a table at the end."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from egmla_megatron.preprocess.options import Options
from egmla_megatron.preprocess.plan import Plan
from egmla_megatron.preprocess.sources import Source

__all__ = ["LICENCE", "describe_inputs", "describe_result", "is_climbmix"]

LICENCE = "ClimbMix is licensed CC BY-NC 4.0: name its authors (NVIDIA), no commercial use."
_CLIMBMIX = re.compile("climb[-_ ]?mix")
_SOME = 20  # documents for validation that are better than none
_LISTED = 20  # inputs printed one by one


def is_climbmix(sources: Iterable[Source]) -> bool:
    """By name: others have clusters, too."""
    return any(_CLIMBMIX.search(source.name.lower()) for source in sources)


def describe_inputs(plan: Plan) -> str:
    """One line per input, with what it was taken for."""
    lines = []
    for source in plan.sources[:_LISTED]:
        column = f" in column {source.column}" if source.column else ""
        size = f", {source.bytes / 1e6:,.1f} MB" if source.bytes else ""
        lines.append(f"{source.name}: {source.format}, {source.kind}{column}{size}")
    if len(plan.sources) > _LISTED:
        kinds = Counter(f"{source.format} {source.kind}" for source in plan.sources[_LISTED:])
        lines.append("and " + ", ".join(f"{count:,} more {kind}" for kind, count in kinds.items()))
    v = plan.vocabulary
    lines.append(
        f"{len(plan.parts)} parts; ids 0 to {v.size - 1} as {v.dtype.name}, end of document {v.eos_id} ({v.tokenizer})"
    )
    return "\n".join(lines)


def _no_validation(documents: int, options: Options) -> str:
    """Why there is none, and how to get some."""
    if not options.validation_fraction:
        return "none, as asked (--validation-fraction 0)"
    share = f"--validation-fraction {options.validation_fraction:g}"
    if documents < 2:
        return f"none: {share} chose none of {documents} documents"
    enough = min(0.5, _SOME / documents)
    return (
        f"none: {share} chose none of {documents:,} documents; --validation-fraction {enough:.2g} (with --overwrite) "
        f"chooses about {round(enough * documents)}"
    )


def describe_result(
    manifest: dict[str, Any], options: Options, valid: dict[str, Any] | None, seconds: Mapping[str, float]
) -> str:
    """The summary table. valid: manifest of the validation data. seconds: time of each phase of this run."""
    counts: Counter[str] = Counter()
    for entry in manifest["inputs"]:
        counts.update({key: value for key, value in entry.items() if isinstance(value, int)})
    endings = Counter(entry["end_of_document"] for entry in manifest["inputs"] if entry["kind"] == "tokens")
    facts = manifest["preprocess"]
    dropped = f"{counts['null']:,} null, {counts['empty']:,} empty, {counts['faults']:,} faulty"
    table = {
        "documents": f"{manifest['documents']:,}",
        "tokens": f"{manifest['tokens']:,}",
        "bytes": f"{manifest['bytes']['bin']:,} ({manifest['dtype']})",
        "validation": _no_validation(manifest["documents"], options)
        if valid is None
        else f"{valid['documents']:,} documents, {valid['tokens']:,} tokens",
        "distinct ids": f"{facts['distinct_ids']:,} of {manifest['vocab_size']:,}",
        "distinct ids per 8192 tokens": f"{100 * manifest['unique_fraction_of_8192']:.1f}%",
        "longest document": f"{manifest['longest_document']:,} tokens",
        "dropped rows": f"{dropped} of {counts['rows']:,}; {manifest['unreadable_inputs']} unreadable files",
        "duplicates dropped": f"{facts['duplicates_dropped']:,}" if options.dedupe else "not looked for (--dedupe)",
    }
    table["time"] = ", ".join(f"{phase} {spent:.2f} s" for phase, spent in seconds.items())
    if endings:
        table["end of document in inputs"] = ", ".join(f"{kind} in {n:,} files" for kind, n in sorted(endings.items()))
    if counts["inner_eos"]:
        table["end of document inside rows"] = f"{counts['inner_eos']:,}: rows hold several documents each"
    if manifest["clusters"]:
        table["clusters"] = f"{len(manifest['clusters'])}, sizes in {options.output}.json"
    width = max(map(len, table))
    lines = [f"{name:<{width}}  {value}" for name, value in table.items()]
    lines += [f"skipped: {fault}" for fault in manifest["faults"]]
    unnamed = counts["faults"] + manifest["unreadable_inputs"] - len(manifest["faults"])
    if unnamed > 0:
        lines.append(f"skipped: {unnamed:,} more; how many of which file: inputs in {options.output}.json")
    return "\n".join(lines)
