"""What one rank should send in a step, from the configuration alone.

Left out, because they are small: token ids, the loss, the gradient norm, padding of gradient buckets and of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from egmla_megatron.bench.ring import ring_bytes
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.model.count import count_parameters

__all__ = ["Traffic", "exchanged_rows", "gradient_bytes", "predict_traffic", "weight_bytes"]


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in one step."""

    dense: float  # gradients of everything but the tables, and gathered parameters with the distributed optimizer
    tables: float  # the same for the gating tables, over their replicas
    exchange: float  # gate embeddings forward, their gradients backward

    @property
    def total(self) -> float:
        """All of them."""
        return self.dense + self.tables + self.exchange


def exchanged_rows(cfg: RunConfig, *, tokens: int, own: int, union: int) -> int:
    """Rows that a rank receives in one step: of its tokens, or of the tokens of the whole gate group.

    Args:
        tokens: tokens of one rank and step.
        own: distinct ids of one rank, summed over its micro-batches.
        union: distinct ids of the gate group, likewise.
    """
    if cfg.parallel.gate_exchange == "all_to_all":
        return own if cfg.parallel.unique_ids else tokens
    return union if cfg.parallel.unique_ids else tokens * cfg.parallel.gate_group


def gradient_bytes(elements: float, replicas: int, cfg: RunConfig) -> float:
    """Sent to sum gradients over `replicas`: an all-reduce, or a reduce-scatter for the distributed optimizer."""
    kind = "reduce_scatter" if cfg.optimizer.distributed else "allreduce"
    return ring_bytes(kind, elements * cfg.parallel.grad_element_bytes, replicas)


def weight_bytes(elements: float, replicas: int, cfg: RunConfig) -> float:
    """Sent to gather the weights that the distributed optimizer scattered over `replicas`.

    megatron-core has one optimizer for the tables and one for the rest. Unless gathering overlaps with forward, each of
    the two gathers the weights of both after its step: twice the bytes.
    """
    if not cfg.optimizer.distributed:
        return 0.0
    gathers = 2 if cfg.model.gated and not cfg.parallel.overlap_param_gather else 1
    return ring_bytes("allgather", gathers * elements * cfg.train.element_bytes / replicas, replicas)


def _reduced(elements: float, replicas: int, cfg: RunConfig) -> float:
    return gradient_bytes(elements, replicas, cfg) + weight_bytes(elements, replicas, cfg)


def predict_traffic(cfg: RunConfig, ranks: int, rows: int) -> Traffic:
    """For `ranks` data-parallel ranks without model parallelism.

    Args:
        rows: see `exchanged_rows`; not used where the tables are replicated.
    """
    count, group = count_parameters(cfg.model), cfg.parallel.gate_group
    width = cfg.model.num_layers * cfg.model.kv_emb_dim * cfg.train.element_bytes  # bytes of one row, all layers
    return Traffic(
        dense=_reduced(count.active, ranks, cfg),
        tables=_reduced(count.gate_tables / group, ranks // group, cfg),
        exchange=2 * rows * width * (group - 1) / group,
    )
