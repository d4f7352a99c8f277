"""GPUs by name: memory and dense bf16 peak, from the vendor's data sheets."""

from __future__ import annotations

from dataclasses import dataclass

from egmla_megatron.errors import UserError

__all__ = ["CARDS", "PEAK_BF16_FLOPS", "USABLE", "Card", "find_card"]

USABLE = 0.94  # of a card's memory: the rest is for CUDA, NCCL and gaps between blocks

# dense bf16 peak of one card, FLOP/s, without sparsity (vendor data sheets)
# the first name that is part of the card's counts, so the slower variants of a card come before it
PEAK_BF16_FLOPS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H800 PCIe": 756e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
}


@dataclass(frozen=True)
class Card:
    """One GPU."""

    name: str
    memory_gib: float  # that a program sees
    bf16_tflops: float  # dense peak, without sparsity


_MEMORY_GIB = {"h100": 79.2, "h200": 139.8, "a100": 79.2, "a800": 79.2}
CARDS = {name: Card(name, size, PEAK_BF16_FLOPS[name.upper()] / 1e12) for name, size in _MEMORY_GIB.items()}


def find_card(name: str, memory_gib: float | None, bf16_tflops: float | None) -> Card:
    """The card of that name; any name with both numbers given.

    Raises:
        UserError: an unknown name without its numbers.
    """
    known = CARDS.get(name.lower())
    if known is None and (memory_gib is None or bf16_tflops is None):
        raise UserError(
            f"--gpu: got {name}, allowed {', '.join(CARDS)}, or any name with --gpu-memory-gib and --gpu-tflops (dense "
            "bf16 peak); give both"
        )
    memory = memory_gib if memory_gib is not None else known.memory_gib  # type: ignore[union-attr]
    peak = bf16_tflops if bf16_tflops is not None else known.bf16_tflops  # type: ignore[union-attr]
    return Card(name.lower(), memory, peak)
