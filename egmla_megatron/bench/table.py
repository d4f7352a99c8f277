"""The result as a Markdown table, beside the paper's."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from egmla_megatron.bench.paper import PaperRow, paper_pairs

__all__ = ["markdown", "saved", "speedup"]

Row = dict[str, Any]
_HEAD = (
    "variant",
    "W",
    "n",
    "step ms (p10 to p90)",
    "tokens/s",
    "x vanilla",
    "x vanilla_unique",
    "peak MiB",
    "saved",
    "exchange ms (share)",
    "exposed ms",
    "MB sent per rank",
    "predicted",
    "on the wire",
    "loss first, last",
)


def speedup(row: Row, vanilla: Row | None) -> float | None:
    """Throughput / vanilla's: the median over rounds, each round compared with itself, so that drift cancels."""
    if vanilla is None:
        return None
    pairs = zip(vanilla["step_ms_median_of_rounds"], row["step_ms_median_of_rounds"], strict=True)
    return statistics.median(theirs / ours for theirs, ours in pairs)


def saved(row: Row, vanilla: Row | None) -> float | None:
    """Share of vanilla's peak memory that is not used; None where memory is not known."""
    if vanilla is None or not vanilla["peak_mib"] or row["peak_mib"] is None:
        return None
    return 1 - row["peak_mib"] / vanilla["peak_mib"]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _megabytes(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:,.2f}"


def _exchange(milliseconds: float | None, step: float) -> str:
    return "-" if milliseconds is None else f"{milliseconds:,.2f} ({milliseconds / step:.1%})"


def _cells(row: Row, vanilla: Row | None, unique: Row | None) -> list[str]:
    median = row["step_ms_median"]
    return [
        row["variant"],
        str(row["gate_world"]),
        str(row["n"]),
        f"{median:,.1f} ({row['step_ms_p10']:,.1f} to {row['step_ms_p90']:,.1f})",
        f"{row['tokens_per_second']:,.0f}",
        _number(speedup(row, vanilla), ".2f"),
        _number(speedup(row, unique), ".2f"),
        _number(row["peak_mib"], ",.0f"),
        _number(saved(row, vanilla), ".1%"),
        _exchange(row["exchange_ms"], median),
        _number(row["exposed_ms"], ",.2f"),
        _megabytes(row["bytes_sent_per_rank"]),
        _megabytes(row["bytes_predicted_per_rank"]),
        _megabytes(row["wire_bytes_per_rank"]),
        f"{row['loss_first']:.4f}, {row['loss_last']:.4f}",
    ]


def _paper_cells(row: PaperRow, vanilla: PaperRow) -> list[str]:
    return [
        f"*paper: {row.method}*",
        str(row.nodes),
        "-",
        f"{row.step_ms:.1f}",
        f"{row.tokens_per_second:,}",
        f"{row.tokens_per_second / vanilla.tokens_per_second:.2f}",
        "-",
        f"{row.peak_mb:,} MB",
        f"{1 - row.peak_mb / vanilla.peak_mb:.1%}",
        _exchange(row.exchange_ms, row.step_ms),
        *["-"] * 5,
    ]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def markdown(result: dict[str, Any]) -> str:
    """The whole result for a person to read.

    Args:
        result: what `session.run_ranks` writes as JSON.
    """
    rows, settings, hardware = result["rows"], result["settings"], result["hardware"]
    vanilla = next((row for row in rows if row["variant"] == "vanilla"), None)
    lines = [_line(_HEAD), _line(["---"] * len(_HEAD))]
    unique = next((row for row in rows if row["variant"] == "vanilla_unique"), None)
    lines += [_line(_cells(row, vanilla, unique)) for row in rows]
    for theirs, ours in paper_pairs(rows[0]["gate_world"]):
        lines += [_line(_paper_cells(theirs, theirs)), _line(_paper_cells(ours, theirs))]
    link, model = result["link"], settings["config"]["model"]["name"]
    card = hardware["gpu"] or hardware["cpu"]
    return "\n".join(
        [
            f"# Sharding of the gating tables: {model} on {settings['ranks']} ranks",
            "",
            f"{card}; link {link['gb_per_s']:.3f} GB/s (bus bandwidth of an all-reduce of "
            f"{link['payload_mib']} MiB, median of {link['n']}); {settings['tokens_per_rank']} tokens a rank and step, "
            f"{settings['unique_fraction']:.1%} of them distinct ids; {settings['precision']}, gradients in "
            f"{settings['gradients']}, overlap {_switch(settings['overlap'])}, distributed optimizer "
            f"{_switch(settings['distributed_optimizer'])}. Commit {result['commit'] or 'unknown'}.",
            "",
            *lines,
            "",
            "A step's time is its slowest rank's. Compare like with like: `..._no_unique` with `vanilla`, those with "
            "distinct ids with `vanilla_unique`; the ratio to `vanilla` holds the gain of both. Exchange: the gate "
            "group's collectives beside the rest of an eager step, by the rank that came last; exposed: how long the "
            "layers themselves waited for them, a lower bound where gradient reductions share the link. Bytes are "
            "those of one step: counted from its collectives by the ring formulas, predicted from the configuration, "
            "and sent by the network interface (headers and acknowledgements included). The paper: EG-MLA-Base, 8192 "
            "tokens a node and step.",
            "",
        ]
    )


def _switch(on: bool) -> str:
    return "on" if on else "off"
