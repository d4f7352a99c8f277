"""The proof as a table."""

from __future__ import annotations

from typing import Any

from egmla_megatron.parallel.parity.verdict import NUMBER_ERROR, TENSOR_ERROR, passes

__all__ = ["crash_name", "format_table"]

_COLUMNS = (("loss", ("loss", "last_loss", "evaluation")), ("grad norm", ("grad_norm", "last_grad_norm")))


def crash_name(ranks: int) -> str:
    """Row of a job that did not come to its end."""
    return f"(job of {ranks} ranks)"


def _line(name: str, ranks: list[dict[str, Any]]) -> list[str]:
    if "crashed" in ranks[0]:
        return [name, "", "-", "-", "-", "-", f"CRASHED: exit code {ranks[0]['crashed']}"]
    drifted = sorted({parameter for errors in ranks for parameter in errors["drifted"]})
    apart = f"DRIFTED: {drifted[0]}" if drifted else ""
    if "loss" not in ranks[0]:
        return [name, str(len(ranks)), "-", "-", "-", "-", apart or "replicas identical"]
    numbers = [f"{max(errors[key] for errors in ranks for key in keys):.1e}" for _, keys in _COLUMNS]
    gradient, at = max((errors["gradient"], errors["gradient_at"]) for errors in ranks)
    weight = max(errors["weight"] for errors in ranks)
    verdict = "equal" if all(map(passes, ranks)) else f"DIFFERENT ({at})"
    return [name, str(len(ranks)), *numbers, f"{gradient:.1e}", f"{weight:.1e}", apart or verdict]


def format_table(found: dict[str, list[dict[str, Any]]]) -> tuple[str, bool]:
    """(table of case -> errors of every rank, whether all passed). Errors are the worst over ranks."""
    head = ["case", "ranks", *(title for title, _ in _COLUMNS), "gradients", "weights", "against one rank"]
    rows = [head, *(_line(name, ranks) for name, ranks in found.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    failed = [name for name, ranks in found.items() if not all(map(passes, ranks))]
    summary = f"{len(found) - len(failed)} of {len(found)} cases equal one rank"
    tensors = f"gradients to {TENSOR_ERROR['gradient']:g} and weights to {TENSOR_ERROR['weight']:g} of the largest"
    norms = f"norms to {NUMBER_ERROR['grad_norm']:g}, after four steps {NUMBER_ERROR['last_grad_norm']:g}"
    limits = f"losses to {NUMBER_ERROR['loss']:g} relative, {norms}, {tensors}"
    return "\n".join([*lines, "", f"{summary} ({limits} element; worst over the ranks; fp32, five steps)"]), not failed
