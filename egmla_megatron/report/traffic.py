"""Bytes that one rank sends in a step, collective by collective, from the configuration alone.

Counted with torch's layers on 2 ranks and compared in a test; Transformer Engine's differ under tensor parallelism,
where it computes the latent's down-projection on every rank, and under context parallelism, where it sends keys and
values around instead of gathering them (as many bytes). Left out: the loss, the gradient norm, gradients of norms
under sequence parallelism, padding of rows. Token ids are never exchanged: the loaders of a gate group plan alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from egmla_megatron.bench.predict import exchanged_rows, gradient_bytes, weight_bytes
from egmla_megatron.bench.ring import ring_bytes
from egmla_megatron.config.check import Layout
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.report.buffers import key_and_value_elements
from egmla_megatron.report.memory import parameters_of_rank, unique_fraction

__all__ = ["Collective", "collectives_of_step", "tensor_parallel_bytes"]

_FP32 = 4
Add = Callable[[str, float, float], None]  # kind of collective, bytes that a rank has before it, how often


@dataclass(frozen=True)
class Collective:
    """What one rank sends in one step for one purpose."""

    purpose: str
    kind: str  # all_reduce, reduce_scatter, all_gather, all_to_all, send
    ranks: int  # of the group
    stride: int  # distance of neighbours in the group, in ranks
    sent_bytes: float  # by one rank in one step, by the ring formula


def collectives_of_step(cfg: RunConfig, layout: Layout, stage: int) -> list[Collective]:
    """Of a rank of one pipeline stage; those of one rank alone are left out."""
    found = [
        *_of_gradients(cfg, layout, stage),
        *_of_gates(cfg, layout),
        *_of_tensor_parallelism(cfg, layout, stage),
        *_of_stages(cfg, layout, stage),
        *_of_context(cfg, layout),
    ]
    return [each for each in found if each.ranks > 1 and each.sent_bytes > 0]


def _tokens(cfg: RunConfig, layout: Layout) -> int:
    """Of a micro-batch on one rank."""
    return cfg.train.micro_batch_size * cfg.train.seq_length // layout.cp


def _of_gradients(cfg: RunConfig, layout: Layout, stage: int) -> list[Collective]:
    dense, tables = parameters_of_rank(cfg, layout, stage)
    replicas = layout.dp * layout.cp
    sum_ = "reduce_scatter" if cfg.optimizer.distributed else "all_reduce"
    found = []
    for name, elements, ranks, stride in (
        ("dense", dense, replicas, layout.tp),
        ("table", tables, layout.gate_data_parallel, layout.gate_group),
    ):
        found.append(Collective(f"{name} gradients", sum_, ranks, stride, gradient_bytes(elements, ranks, cfg)))
        found.append(Collective(f"{name} weights", "all_gather", ranks, stride, weight_bytes(elements, ranks, cfg)))
    if layout.pp > 1 and cfg.model.tie_word_embeddings and stage in (0, layout.pp - 1):
        embedding = cfg.model.vocab_size * cfg.model.hidden_size / layout.tp
        size = embedding * cfg.parallel.grad_element_bytes
        stride = layout.world_size // layout.pp * (layout.pp - 1)
        found.append(Collective("tied embedding", "all_reduce", 2, stride, ring_bytes("all_reduce", size, 2)))
    return found


def _of_gates(cfg: RunConfig, layout: Layout) -> list[Collective]:
    """Rows of the micro-batch to every rank of the gate group, their gradients back."""
    group = layout.gate_group
    if not cfg.model.gated or group == 1:
        return []
    tokens = _tokens(cfg, layout)
    # ranks of one tensor-parallel group read the same tokens
    readers = max(1, group // layout.tp)
    union = round(tokens * readers * unique_fraction(tokens * readers, cfg.data.unique_fractions))
    own = round(tokens * unique_fraction(tokens, cfg.data.unique_fractions))
    rows = exchanged_rows(cfg, tokens=tokens, own=own, union=union)
    if cfg.parallel.gate_exchange == "all_gather" and not cfg.parallel.unique_ids:
        rows = tokens * readers
    width = layout.layers_per_stage * cfg.model.kv_emb_dim * cfg.train.element_bytes
    size = layout.num_microbatches * rows * width * (group - 1) / group
    there, back = ("all_to_all",) * 2
    if cfg.parallel.gate_exchange == "all_gather":
        there, back = "all_gather", "reduce_scatter"
    return [
        Collective("gate rows", there, group, 1, size),
        Collective("gate gradients", back, group, 1, size),
    ]


def tensor_parallel_bytes(cfg: RunConfig, layout: Layout, stage: int) -> dict[str, float]:
    """kind -> bytes that a rank sends for one micro-batch."""
    tp, model, wide, tokens = layout.tp, cfg.model, cfg.train.element_bytes, _tokens(cfg, layout)
    hidden = tokens * model.hidden_size * wide
    again = 1 if cfg.train.recompute == "full" else 0
    layers = layout.layers_per_stage
    first, last = stage == 0, stage == layout.pp - 1
    mla = model.attention == "mla"
    columns = 3 if mla else 2  # GEMMs whose input every rank needs whole: q and kv down (or qkv), MLP
    found = dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter"), 0.0)

    def add(kind: str, size: float, times: float) -> None:
        """`size`: of what a rank has before the collective."""
        found[kind] += times * ring_bytes(kind, size, tp)

    # the latent's projections are computed again, with the gather of their input, but not the MLP
    gathers = layers * (columns * (2 + again) + 2 + 2 * (mla and cfg.train.recompute == "selective"))
    reductions = layers * (2 * (1 + again) + columns) + last
    if cfg.parallel.sequence:
        # forward, the input once more for the weight gradients, adjoints of the row-parallel GEMMs' scatter
        add("all_gather", hidden / tp, gathers + 2 * last + first)
        add("reduce_scatter", hidden, reductions + (first and mla))
        add("all_reduce", hidden, first and not mla)  # learned positions are added to the whole embedding
    else:
        add("all_reduce", hidden, reductions + first)
    if mla:
        _add_latent(add, cfg, layout, tokens, wide)
    if last:
        add("all_reduce", tokens * _FP32, 3)  # of the loss: largest logit, logit of the label, sum of exponentials
    return found


def _add_latent(add: Add, cfg: RunConfig, layout: Layout, tokens: int, wide: int) -> None:
    """The latent's way: cut by columns behind its down-projection, whole before the up-projection."""
    model, layers, tp = cfg.model, layout.layers_per_stage, layout.tp
    again = 0 if cfg.train.recompute == "none" else 1  # both kinds repeat the projections
    latent, rope = (tokens * size * wide for size in (model.kv_lora_rank, model.qk_rope_head_dim))
    query = tokens * model.q_lora_rank * wide
    add("all_gather", (latent + rope) / tp, layers * (1 + again))
    if query:
        add("all_gather", query / tp, layers * (1 + again))
    if cfg.parallel.sequence:
        add("all_gather", (latent + rope + query) / tp, layers)  # adjoint of the cut along the sequence
        add("all_gather", (latent + query) / tp, layers * (2 + again))
        add("all_gather", rope / tp, layers * (1 + again))
        add("reduce_scatter", latent + query + rope, layers)
    else:
        add("all_reduce", latent + rope + query, layers)
    if model.gated and model.gate_norm:
        # mean, variance and mean square; their gradients, of which kernels need two
        add("all_reduce", tokens * 3 * _FP32, layers * (2 + again))


def _of_tensor_parallelism(cfg: RunConfig, layout: Layout, stage: int) -> list[Collective]:
    if layout.tp == 1:
        return []
    sizes = tensor_parallel_bytes(cfg, layout, stage)
    count = layout.num_microbatches
    return [Collective("tensor parallelism", kind, layout.tp, 1, count * size) for kind, size in sizes.items()]


def _of_stages(cfg: RunConfig, layout: Layout, stage: int) -> list[Collective]:
    if layout.pp == 1:
        return []
    hidden = _tokens(cfg, layout) * cfg.model.hidden_size * cfg.train.element_bytes
    if cfg.parallel.sequence:
        hidden //= layout.tp
    # chunks of this rank that hand on activations, and those that hand back gradients
    forward = layout.vp - (stage == layout.pp - 1)
    backward = layout.vp - (stage == 0)
    stride = layout.world_size // layout.pp
    size = layout.num_microbatches * hidden
    return [
        Collective("activations to the next stage", "send", layout.pp, stride, size * forward),
        Collective("gradients to the stage before", "send", layout.pp, stride, size * backward),
    ]


def _of_context(cfg: RunConfig, layout: Layout) -> list[Collective]:
    """Keys and values of the other parts of the sequence, and their gradients."""
    if layout.cp == 1:
        return []
    model = cfg.model
    elements = _tokens(cfg, layout) * model.num_attention_heads / layout.tp * key_and_value_elements(model)
    size = elements * cfg.train.element_bytes
    calls = layout.num_microbatches * layout.layers_per_stage
    again = 2 if cfg.train.recompute == "full" else 1
    gathered, summed = (
        ring_bytes("all_gather", size, layout.cp),
        ring_bytes("reduce_scatter", size * layout.cp, layout.cp),
    )
    return [
        Collective("keys and values", "all_gather", layout.cp, layout.tp, calls * again * gathered),
        Collective("their gradients", "reduce_scatter", layout.cp, layout.tp, calls * summed),
    ]
