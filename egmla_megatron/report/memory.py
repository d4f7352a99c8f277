"""Memory of every rank of a training, by part, from the configuration alone.

Fitted to nothing: every number is a tensor that training keeps, and tests compare the sums with what the model really
saves and what GPUs really held at their peak (`tools/records/README.md`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from egmla_megatron.config.check import Layout
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.model.count import count_parameters
from egmla_megatron.report.buffers import communication_buffers

__all__ = [
    "Memory",
    "layer_activations",
    "memory_per_rank",
    "optimizer_bytes",
    "parameters_of_rank",
    "state_bytes",
    "unique_fraction",
    "worst_stage",
]

_WORKSPACE = 32 << 20  # bytes on Hopper: cuBLAS's for forward and for the thread of backward, Transformer Engine's

_LINEAR = ("q_projection", "kv_down_projection", "kv_up_projection", "output_projection", "mlp")  # by train.fp8 in FP8

# T tokens of a micro-batch on a rank, U distinct ids among them, h hidden size

# Share of distinct ids among 2**10 ... 2**16 tokens of English in GPT-2's vocabulary (of 107M tokens).
_FIRST_POWER, _ENGLISH = 10, (0.38, 0.32, 0.26, 0.21, 0.18, 0.15, 0.12)


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank at the peak of a step, as torch's allocator counts them; CUDA and NCCL hold 1 to 3 GiB more."""

    weights: int  # dense; with train.fp8 also what Transformer Engine casts those of linear layers to
    gate_tables: int  # this rank's columns of its layers
    gradients: int  # of both, as the reductions hold them
    optimizer: int  # of both: fp32 master weights, or their lower halves, and two moments
    activations: int  # saved for backward, of all micro-batches in flight
    logits: int  # and their gradient, in one place with Transformer Engine; 0 where another moment is the peak
    communication: int  # what collectives and stages hold beside the tensors that they move (buffers.py)
    temporary: int  # while the peak lasts: gradients of the head, or those of a layer and what it computes again, or
    # what Adam makes of the largest parameter in its first step
    workspaces: int  # of cuBLAS and Transformer Engine

    @property
    def total(self) -> int:
        """Their sum."""
        return sum(getattr(self, field.name) for field in fields(self))


def unique_fraction(tokens: int, shares: Sequence[float] = _ENGLISH) -> float:
    """Expected share of distinct ids among so many tokens.

    Args:
        shares: those among 1024 tokens and powers of two from there; empty: of English.
    """
    shares = shares or _ENGLISH
    place = math.log2(max(tokens, 1)) - _FIRST_POWER
    if place <= 0:
        return min(1.0, shares[0] - 0.06 * place)
    if place >= len(shares) - 1:
        return shares[-1] * 0.85 ** (place - len(shares) + 1)
    low = int(place)
    return shares[low] + (place - low) * (shares[low + 1] - shares[low])


def _rows_per_token(cfg: RunConfig, tokens: int) -> float:
    """Rows of the gating tables that a micro-batch takes."""
    return unique_fraction(tokens, cfg.data.unique_fractions) if cfg.parallel.unique_ids else 1.0


def worst_stage(cfg: RunConfig, layout: Layout, *, te: bool, triton: bool) -> tuple[int, Memory]:
    """(pipeline stage, its memory) that needs most."""
    stages = [(stage, memory_per_rank(cfg, layout, stage, te=te, triton=triton)) for stage in range(layout.pp)]
    return max(stages, key=lambda found: found[1].total)


def memory_per_rank(cfg: RunConfig, layout: Layout, stage: int, *, te: bool, triton: bool) -> Memory:
    """Of a rank of one pipeline stage.

    Args:
        te: layers by Transformer Engine, else by torch.
        triton: gate and heads by our kernels.
    """
    dense, tables = parameters_of_rank(cfg, layout, stage)
    wide = cfg.train.element_bytes
    layer = _Layer.of(cfg, layout, te=te, triton=triton)
    in_flight = min(layout.pp - stage, layout.num_microbatches) if layout.pp > 1 else 1
    saved = layer.saved * layout.layers_per_stage + layer.stage + (layer.last if stage == layout.pp - 1 else 0)
    logits, head = _head(cfg, layout, layer.tokens, te=te) if stage == layout.pp - 1 else (0, 0)
    buffers = communication_buffers(cfg, layout, stage, in_flight, te=te)
    communication = buffers.kept
    if logits + head < layer.transient + buffers.in_layer:
        logits, head, communication = 0, layer.transient, buffers.kept + buffers.in_layer
    adam = _first_adam(cfg, layout, dense, tables, te=te)
    activations = in_flight * saved
    if activations + logits + communication + head < adam:
        activations, logits, communication, head = 0, 0, 0, adam
    return Memory(
        weights=wide * dense + _fp8_weights(cfg, layout),
        gate_tables=wide * tables,
        gradients=cfg.parallel.grad_element_bytes * (dense + tables),
        optimizer=optimizer_bytes(cfg, layout, stage, sharded=cfg.optimizer.distributed, te=te),
        activations=activations,
        logits=logits,
        communication=communication,
        temporary=head,
        workspaces=_WORKSPACE * (2 + te) if te or triton else 0,
    )


def _fp8_weights(cfg: RunConfig, layout: Layout) -> int:
    """Bytes of the linear layers' weights in FP8, by rows for forward and by columns for backward."""
    if cfg.train.fp8 == "none":
        return 0
    parts = count_parameters(cfg.model).by_part
    linear = sum(parts.get(name, 0) for name in _LINEAR)
    return 2 * linear // layout.pp // layout.tp


def _fp8_activations(cfg: RunConfig, tokens: int) -> float:
    """Bytes of a layer by which activations differ: what goes into the GEMMs behind norms and the MLP's activation is
    kept in FP8 alone, attention's output besides, which attention itself needs in bf16. Within 250 MiB of what FP8
    changed at the peak of 1.2B and Base (speed_one_gpu.json,
    speed_sequences.json).
    """
    if cfg.train.fp8 == "none":
        return 0.0
    model = cfg.model
    return tokens * (model.num_attention_heads * model.v_head_dim - 2 * model.hidden_size - model.intermediate_size)


def _first_adam(cfg: RunConfig, layout: Layout, dense: int, tables: int, *, te: bool) -> int:
    """Bytes beside the optimizer's states when it makes fp32 master weights: Transformer Engine's copies a parameter,
    then in fp32."""
    if not (te and cfg.masters_in_adam) or cfg.optimizer.store_param_remainders:
        return 0
    embedding = cfg.model.vocab_size * cfg.model.hidden_size // layout.tp
    own_dense = min(embedding, dense // (layout.dp * layout.cp))  # the largest but for the tables, one parameter too
    return (2 + 4) * max(own_dense, tables // layout.gate_data_parallel)


def state_bytes(cfg: RunConfig, *, sharded: bool, te: bool) -> int:
    """Of the optimizer's state of a parameter: two fp32 moments, and a master weight unless the weight is it."""
    if cfg.train.element_bytes != 2:
        return 8
    return 10 if sharded and te and cfg.masters_in_adam and cfg.optimizer.store_param_remainders else 12


def optimizer_bytes(cfg: RunConfig, layout: Layout, stage: int, *, sharded: bool, te: bool) -> int:
    """Of the optimizer's states on a rank, with the distributed optimizer or without."""
    dense, tables = parameters_of_rank(cfg, layout, stage)
    state = state_bytes(cfg, sharded=sharded, te=te)
    if not sharded:
        return state * (dense + tables)
    return state * dense // (layout.dp * layout.cp) + state * tables // layout.gate_data_parallel


def layer_activations(cfg: RunConfig, layout: Layout, *, te: bool, triton: bool) -> int:
    """Bytes that a layer keeps of one micro-batch where nothing is computed twice."""
    whole = replace(cfg, train=replace(cfg.train, recompute="none"))
    return _Layer.of(whole, layout, te=te, triton=triton).saved


def _head(cfg: RunConfig, layout: Layout, tokens: int, *, te: bool) -> tuple[int, int]:
    """Bytes of (logits and their gradient, the head's gradients of weight and input) where they are the most."""
    wide = cfg.train.element_bytes
    count = tokens * cfg.model.vocab_size // layout.tp
    weight = wide * cfg.model.vocab_size * cfg.model.hidden_size // layout.tp
    if te and wide == 2:
        # in the head's backward: the gradient has taken the logits' place (model/build.py), and the input's is there
        # while the weight's is made; under sequence parallelism this rank's part of its sum, too
        parts = 1.0 + (1 / layout.tp if cfg.parallel.sequence and layout.tp > 1 else 0.0)
        return wide * count, weight + int(wide * tokens * cfg.model.hidden_size * parts)
    # the softmax in fp32 becomes the gradient, which is copied to the logits' type where that is another
    return (4 + wide) * count, weight


def parameters_of_rank(cfg: RunConfig, layout: Layout, stage: int) -> tuple[int, int]:
    """(dense, gating tables) of a rank. Norms and biases count as if they were sharded: they are a ten-thousandth."""
    parts = dict(count_parameters(cfg.model).by_part)
    tables = parts.pop("gate_tables", 0) // layout.pp // layout.gate_group
    ends = {name: parts.pop(name, 0) for name in ("embedding", "position_embedding", "final_norm", "output_head")}
    dense = sum(parts.values()) // layout.pp
    first, last = stage == 0, stage == layout.pp - 1
    if first:
        dense += ends["embedding"] + ends["position_embedding"]
    if last:
        dense += ends["final_norm"] + ends["output_head"]
        if not first and cfg.model.tie_word_embeddings:
            dense += ends["embedding"]  # the head's copy
    return dense // layout.tp, tables


@dataclass(frozen=True)
class _Layer:
    """Bytes that one micro-batch leaves behind for backward."""

    tokens: int
    saved: int  # by a layer
    stage: int  # by the stage, once
    last: int  # by the last stage, once
    transient: int  # alive only during the backward of one layer

    @classmethod
    def of(cls, cfg: RunConfig, layout: Layout, *, te: bool, triton: bool) -> _Layer:
        model, wide = cfg.model, cfg.train.element_bytes
        tokens = cfg.train.micro_batch_size * cfg.train.seq_length // layout.cp
        part = 1 / layout.tp  # of what is split over heads or columns
        along = part if cfg.parallel.sequence else 1.0  # of what is split over the sequence, if at all
        hidden = tokens * model.hidden_size * along
        # input and output of both norms; what goes into the MLP's second GEMM and what made it
        rest = 4 * hidden + 3 * tokens * model.intermediate_size * part
        if not te:  # SiLU is an operation of its own, and two dropouts keep a byte per element even at 0
            rest += tokens * model.intermediate_size * part + 2 * hidden / wide
        attention, up = _attention(cfg, layout, tokens, along, te=te, triton=triton)
        rest += _fp8_activations(cfg, tokens) / wide  # train.fp8 allows neither tensor parallelism nor recomputation
        rows = tokens * _rows_per_token(cfg, tokens) if model.gated else 0.0
        stack = 2 * rows * layout.layers_per_stage * model.kv_emb_dim  # gate embeddings, and their gradient
        kept, again = rest + attention + up, 0.0
        gradients = 3 * tokens * model.intermediate_size * part + 2 * hidden  # of the MLP, which has the largest
        if cfg.train.recompute == "full":
            kept, again = hidden, kept
        elif cfg.train.recompute == "selective":
            kept, again = rest + attention - _queries(cfg, layout, tokens), up + _queries(cfg, layout, tokens)
        final = 2 * hidden  # input and output of the last norm
        sizes = (kept, stack, final, again + gradients)
        return cls(tokens, *(int(wide * size) for size in sizes))


def _queries(cfg: RunConfig, layout: Layout, tokens: int) -> float:
    """Elements of queries, keys and values."""
    model = cfg.model
    if model.attention == "mha":
        return 0.0  # core attention is recomputed, its inputs stay
    key = model.qk_nope_head_dim + model.qk_rope_head_dim
    return tokens * model.num_attention_heads / layout.tp * (2 * key + model.v_head_dim)


def _attention(
    cfg: RunConfig, layout: Layout, tokens: int, along: float, *, te: bool, triton: bool
) -> tuple[float, float]:
    """Elements of (what attention itself saves, what makes keys and values out of the latent)."""
    model = cfg.model
    heads = model.num_attention_heads / layout.tp
    out = tokens * heads * model.v_head_dim * (1 if te else 2)  # torch's is laid out anew for the next GEMM
    if model.attention == "mha":
        return tokens * heads * 3 * model.v_head_dim + out, 0.0
    latent = tokens * along * (2 * model.kv_lora_rank + model.qk_rope_head_dim + 2 * model.q_lora_rank)
    kv = heads * (model.qk_nope_head_dim + model.v_head_dim)
    up = 0.0
    if model.gated:
        norm = 1.0  # the product that it normalises
        if triton and cfg.parallel.unique_ids:
            norm = 0.0  # computed again in backward
        elif layout.tp > 1:
            norm = 12 / cfg.train.element_bytes  # three times in fp32, by single operations
        up = tokens * kv * (1 + _rows_per_token(cfg, tokens) + (norm if model.gate_norm else 0.0))
    return latent + _queries(cfg, layout, tokens) + out, up
