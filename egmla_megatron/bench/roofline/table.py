"""What was measured as rows, and the rows as a Markdown table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from egmla_megatron.bench.roofline.case import Case
from egmla_megatron.bench.roofline.cost import Cost, Machine
from egmla_megatron.bench.roofline.timing import Times
from egmla_megatron.bench.rows import percentile
from egmla_megatron.report.tables import NONE, markdown

__all__ = ["kernel_table", "make_row", "sum_of_rows"]

Row = dict[str, Any]
_ABOVE = " (!)"
_OF_ABOVE = (
    f"{_ABOVE.strip()}: faster than the bound, which therefore is none here: the kernel's inputs came from caches, "
    "which are faster than the memory that the copy measured, or its products are faster than those that were measured."
)
_HEAD = (
    "kernel",
    "pass",
    "per micro-batch",
    "MB",
    "GFLOP",
    "us (p10 to p90)",
    "TB/s",
    "of copy",
    "TFLOP/s",
    "of product",
    "bound",
    "of bound",
)


_LEGEND = (
    "MB: what a kernel must at least read and write, each input and output once; GFLOP: of matrix products, of "
    "attention the causal half. Bound: the longer of MB at the speed of the copy and GFLOP at that of the product. "
    f"Rows with {NONE} per micro-batch compute what other rows do, for comparison. 1/n: once in a step of n "
    "micro-batches. A step also does what is not here: look-ups in embedding and gating tables, sums and norm of "
    "gradients, launching."
)


def make_row(case: Case, times: Times, machine: Machine) -> Row:
    """One row of the result; a share is the part of what was measured of the machine that the kernel reaches."""
    needs = Cost(round(case.cost.bytes * case.scale), round(case.cost.flops * case.scale))
    us = [each * case.scale for each in times.us]
    median = statistics.median(us)
    bound_us = machine.bound_s(needs) * 1e6
    per_s = {"bytes": needs.bytes / median * 1e6, "flops": needs.flops / median * 1e6}
    return {
        "kernel": case.kernel,
        "pass": case.direction,
        "per_micro_batch": case.count,
        "counted": case.counted,
        "bytes": needs.bytes,
        "flops": needs.flops,
        "us_median": median,
        "us_p10": percentile(us, 0.1),
        "us_p90": percentile(us, 0.9),
        "n": len(us),
        "calls_at_once": times.calls,
        "timed_part": 1 / case.scale,
        "tb_per_s": per_s["bytes"] / 1e12,
        "share_of_copy": per_s["bytes"] / machine.bytes_per_s,
        "tflops_per_s": per_s["flops"] / 1e12,
        "share_of_product": per_s["flops"] / machine.flops_per_s,
        "bound": "memory" if machine.memory_s(needs) >= machine.matrix_s(needs) else "matrix",
        "bound_us": bound_us,
        "share_of_bound": bound_us / median,
    }


def sum_of_rows(rows: Sequence[Row]) -> dict[str, float]:
    """Microseconds of a micro-batch: the kernels that belong to it, each as often as it runs."""
    counted = [row for row in rows if row["counted"]]
    return {name: sum(row["per_micro_batch"] * row[name] for row in counted) for name in ("us_median", "bound_us")}


def kernel_table(result: dict[str, Any]) -> str:
    """The whole result for a person to read.

    Args:
        result: what `session.run_kernel_bench` writes as JSON.
    """
    above = [_OF_ABOVE] if any(row["share_of_bound"] > 1 for row in result["rows"]) else []
    table = markdown(_HEAD, [_cells(row) for row in result["rows"]])
    return "\n\n".join([*_heading(result), *result["remarks"], _LEGEND, table, *above, _sum(result["sum"])])


def _cells(row: Row) -> list[str]:
    count = row["per_micro_batch"]
    products = row["flops"] > 0
    return [
        row["kernel"],
        row["pass"],
        NONE if not row["counted"] else f"{count:g}" if count >= 1 else f"1/{round(1 / count)}",
        f"{row['bytes'] / 1e6:,.2f}",
        f"{row['flops'] / 1e9:,.2f}" if products else NONE,
        f"{row['us_median']:,.1f} ({row['us_p10']:,.1f} to {row['us_p90']:,.1f})",
        f"{row['tb_per_s']:.3f}",
        f"{row['share_of_copy']:.1%}",
        f"{row['tflops_per_s']:,.1f}" if products else NONE,
        f"{row['share_of_product']:.1%}" if products else NONE,
        f"{row['bound']} {row['bound_us']:,.1f} us",
        _share_of_bound(row),
    ]


def _share_of_bound(row: Row) -> str:
    return f"{row['share_of_bound']:.1%}{_ABOVE if row['share_of_bound'] > 1 else ''}"


def _heading(result: dict[str, Any]) -> list[str]:
    settings, hardware, machine = result["settings"], result["hardware"], result["machine"]
    distinct = f", {settings['distinct_ids']:,d} distinct ids" if settings["distinct_ids"] else ""
    method = (
        "Device time of calls that follow each other in a CUDA graph, inputs from memory."
        if hardware["gpu"]
        else "No CUDA device: times by the host's clock of what torch computes on a CPU, inputs partly from caches. "
        "They show that the tool works, not how fast GPUs are."
    )
    return [
        f"# Kernels of a micro-batch: {settings['model']}",
        f"{hardware['gpu'] or hardware['cpu']}: a copy {machine['copy_tb_per_s']:.4g} TB/s (read and written), a "
        f"matrix product {machine['product_tflops_per_s']:.4g} TFLOP/s in {settings['precision']}, both measured. "
        f"{settings['sequences']} x {settings['length']} tokens{distinct}; layers by {settings['implementation']}, "
        f"attention {settings['attention_backend']}, gate and heads by {settings['kernels']}. "
        f"Commit {result['commit'] or 'unknown'}. {method}",
    ]


def _sum(total: dict[str, float]) -> str:
    share = total["bound_us"] / total["us_median"]
    return (
        f"Sum per micro-batch: {total['us_median'] / 1e3:,.3f} ms; of the bounds: {total['bound_us'] / 1e3:,.3f} ms "
        f"({share:.1%})."
    )
