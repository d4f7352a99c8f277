"""GPUs by name: memory, dense bf16 peak, memory bandwidth and links, from the vendor's data sheets."""

from __future__ import annotations

from dataclasses import dataclass

from egmla_megatron.cli import check_count
from egmla_megatron.errors import UserError

__all__ = [
    "CARDS",
    "LINK_EFFICIENCY",
    "MOST_GPUS",
    "PEAK_BF16_FLOPS",
    "USABLE",
    "WITHOUT_FP8",
    "Card",
    "Cluster",
    "find_card",
    "find_cluster",
]

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
    memory_gb_per_s: float  # peak of its own memory; 0: not known


# GiB that a program sees; GB/s of the card's memory, of NVLink in one direction, and of eight cards' network cards
_SHEETS = {
    "h100": (79.2, 3350.0, 450.0, 400.0),
    "h200": (139.8, 4800.0, 450.0, 400.0),
    "a100": (79.2, 2039.0, 300.0, 200.0),
    "a800": (79.2, 2039.0, 200.0, 200.0),
}
CARDS = {
    name: Card(name, memory, PEAK_BF16_FLOPS[name.upper()] / 1e12, bandwidth)
    for name, (memory, bandwidth, _, _) in _SHEETS.items()
}
WITHOUT_FP8 = ("a100", "a800")
MOST_GPUS = 2**20
_FULL_NODE = 8  # GPUs of the nodes in the data sheets
# Of a link's sheet that NCCL's all-reduce reaches: 218 to 269 of 450 GB/s between two H200
# (tools/records/sharding_two_gpus.json); links between nodes were not measured and get the same.
LINK_EFFICIENCY = 0.55


@dataclass(frozen=True)
class Cluster:
    """How the GPUs are joined."""

    gpus_per_node: int
    gpu_gb_per_s: float  # that one GPU sends to others of its node, as an all-reduce gets it; 0: not known
    node_gb_per_s: float  # that one node sends to others, all GPUs together, likewise; 0: not known
    gpu_origin: str  # where the two rates come from, for the reader
    node_origin: str


def find_card(
    name: str, memory_gib: float | None, bf16_tflops: float | None, memory_gb_per_s: float | None = None
) -> Card:
    """The card of that name; any name with memory and peak given.

    Raises:
        UserError: an unknown name without its numbers, or a number that cannot be.
    """
    known = CARDS.get(name.lower())
    _check_positive("--gpu-memory-gib", memory_gib)
    _check_positive("--gpu-tflops", bf16_tflops)
    _check_positive("--gpu-memory-gb-per-s", memory_gb_per_s)
    if known is None and (memory_gib is None or bf16_tflops is None):
        raise UserError(
            f"--gpu: got {name}, allowed {', '.join(CARDS)}, or any name with --gpu-memory-gib and --gpu-tflops (dense "
            "bf16 peak); give both, and --gpu-memory-gb-per-s for an estimate of the step time"
        )
    memory = memory_gib if memory_gib is not None else known.memory_gib  # type: ignore[union-attr]
    peak = bf16_tflops if bf16_tflops is not None else known.bf16_tflops  # type: ignore[union-attr]
    bandwidth = memory_gb_per_s or (known.memory_gb_per_s if known else 0.0)
    return Card(name.lower(), memory, peak, bandwidth)


def find_cluster(
    card: Card, gpus: int, gpus_per_node: int | None, gpu_gb_per_s: float | None, node_gb_per_s: float | None
) -> Cluster:
    """Links of `gpus` cards: those given, else the data sheet's at `LINK_EFFICIENCY`.

    Raises:
        UserError: a number that cannot be.
    """
    check_count("--gpus", gpus, 1, MOST_GPUS)
    check_count("--gpus-per-node", gpus_per_node, 1, MOST_GPUS)
    _check_positive("--nvlink-gb-per-s", gpu_gb_per_s)
    _check_positive("--link-gb-per-s", node_gb_per_s)
    per_node = min(gpus_per_node or _FULL_NODE, gpus)
    *_, inside, between = _SHEETS.get(card.name, (0.0, 0.0))
    inside = gpu_gb_per_s or inside * LINK_EFFICIENCY
    between = node_gb_per_s or between * per_node / _FULL_NODE * LINK_EFFICIENCY
    sheet = f"data sheet x {LINK_EFFICIENCY}"
    origins = ["as given" if rate else sheet for rate in (gpu_gb_per_s, node_gb_per_s)]
    return Cluster(per_node, inside, between, *origins)


def _check_positive(option: str, value: float | None) -> None:
    if value is not None and not 1e-3 <= value <= 1e6:
        raise UserError(f"{option}: got {value:g}, allowed 0.001 to 1e6; give one, or leave the option out")
