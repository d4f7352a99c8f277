"""How long a step takes, estimated from the configuration, the card and the links, and what it waits for.

A step is what its slowest resource needs: arithmetic and memory traffic of the device one after the other, or the host
that launches the kernels where that is slower, then what of the network nothing hides. The constants below are fitted
to the project's own measurements on H100 and H200 (tools/records); `tests/unit/test_step_time.py` compares the
estimates with all of them. Records of CUDA graphs but speed_remainders.json and speed_two_gpus.json are of slower
kernels: where no slow link holds them up those steps take longer. Hosts differ between machines by a third, and so do
estimates of host-bound steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from egmla_megatron.config.check import Layout
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.model.count import flops_per_token
from egmla_megatron.report.cards import Card, Cluster
from egmla_megatron.report.memory import layer_activations, parameters_of_rank, unique_fraction
from egmla_megatron.report.traffic import Collective, collectives_of_step

__all__ = ["StepTime", "estimate_error", "estimate_step", "link_seconds", "missing_for_estimate"]

# GEMMs reach MOST_OF_PEAK * h / (h + HALF) of the peak for hidden size h. Fitted, with PASSES and SMALL_KERNELS_MS, to
# the steps of speed_remainders.json; two hidden sizes leave HALF open: 50 to 250 are as close, the others to match.
MOST_OF_PEAK, HALF = 0.75, 150
COPY_EFFICIENCY = 0.87  # a copy reaches 4157 of 4800 GB/s (kernels_and_graphs.json)
PASSES = 5.5  # times that a byte saved for backward goes through memory
# of a collective within a node by which what hides it takes longer: it needs multiprocessors (speed_two_gpus.json)
SLOWED = 0.55
# read and written for a parameter that a rank updates, beside zeroing its gradient: norm, clipping, Adam, the weight;
# where the device decides updates Adam alone, without the gradient: moments and master weight both ways, the weight,
# or moments, weight and the master weight's lower half both ways
OPTIMIZER_BYTES, FUSED_BYTES, HALVES_BYTES = 46.0, 26.0, 24.0
ADAM_EFFICIENCY = 0.82  # 3.92 of 4.8 TB/s (train/adam_cuda.py)
# arithmetic of an entry's update that was made later: 100 us for 154M entries (train/adam_rows_cuda.py, whose SWEEP
# this is)
WAITING_UPDATE_S, SWEEP = 0.65e-12, 128
# kernels too small for any bandwidth, ms of a layer and micro-batch: all others; heads and RoPE, and gate, norm and sum
# by row, where our kernels do not compute them (both: 36.8 instead of 29.0 ms with 12 layers, kernels_and_graphs.json)
SMALL_KERNELS_MS, HEADS_MS, GATE_MS = 0.16, 0.45, 0.25
# of a step, the host beside a CUDA graph: 29.0 ms where the GPU computes for 23.7 (kernels_and_graphs.json); where the
# device decides updates it works meanwhile
GRAPH_HOST_MS = 5.3

# The host without a CUDA graph: ms of a layer and micro-batch (forward and backward), and of a step beyond that; fitted
# to all steps that were launched by the host.
HOST_LAYER_MS = {"te": 8.0, "torch": 4.5}
HOST_TENSOR_MS, HOST_SEQUENCE_MS = 4.7, 1.2  # more under tensor and sequence parallelism
HOST_STEP_MS = 40.0


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step of the pipeline stage that takes longest."""

    matrix_s: float  # GEMMs and attention
    memory_s: float  # reading and writing activations, weights, optimizer states
    small_kernels_s: float  # that take longer to start than to run
    host_s: float  # launching all of it
    network_s: float  # all collectives, hidden or not
    network_exposed_s: float  # those that nothing hides
    bubble_s: float  # a pipeline stage without work
    overlap_s: float  # in which device and host both work: the parts above add up to it and the step
    step_s: float
    limited_by: str


# Of estimates against measured steps (tests/unit/test_step_time.py): as CUDA graphs those of this version's kernels are
# met within 6%, which are of three machines with cards of one kind; launched by the host within 20%.
ERROR_OF_GRAPHS, ERROR_OF_EAGER = 0.11, 0.20


def estimate_error(cfg: RunConfig) -> float:
    """By which estimates of such steps may be off, 0 to 1."""
    return ERROR_OF_GRAPHS if cfg.train.cuda_graph else ERROR_OF_EAGER


def _within_node(each: Collective, cluster: Cluster) -> bool:
    return each.ranks * each.stride <= cluster.gpus_per_node


def link_seconds(each: Collective, cluster: Cluster) -> float:
    """Time of a collective: within a node over the GPU's own link, else the node's link that its GPUs share."""
    node = cluster.gpus_per_node
    if _within_node(each, cluster):
        return each.sent_bytes / (cluster.gpu_gb_per_s * 1e9)
    local = max(1, min(each.ranks, node // each.stride))  # ranks of the group in a node
    if each.kind == "all_to_all":
        leaving = node * each.sent_bytes * (each.ranks - local) / (each.ranks - 1)
    else:
        leaving = each.sent_bytes * node / local  # a ring leaves the node once
    between = leaving / (cluster.node_gb_per_s * 1e9)
    return max(between, each.sent_bytes / (cluster.gpu_gb_per_s * 1e9) if local > 1 else 0.0)


def missing_for_estimate(cfg: RunConfig, layout: Layout, card: Card, cluster: Cluster) -> str | None:
    """What an estimate lacks, as something to do; None: nothing."""
    if cfg.train.precision != "bf16":
        return "bf16 only was measured"
    if cfg.train.fp8 != "none":
        return (
            "set train.fp8=none: steps in FP8 are not estimated (measured on one H200: 1.2B 1.10x and 1.16x as "
            "fast as in bf16, Base 0.95x)"
        )
    if not card.memory_gb_per_s:
        return "give --gpu-memory-gb-per-s"
    if layout.world_size > 1 and cluster.gpus_per_node > 1 and not cluster.gpu_gb_per_s:
        return "give --nvlink-gb-per-s"
    if layout.world_size > cluster.gpus_per_node and not cluster.node_gb_per_s:
        return "give --link-gb-per-s"
    return None


def estimate_step(cfg: RunConfig, layout: Layout, card: Card, cluster: Cluster, *, te: bool, triton: bool) -> StepTime:
    """Of the slowest stage.

    Raises:
        ValueError: `missing_for_estimate` names something.
    """
    missing = missing_for_estimate(cfg, layout, card, cluster)
    if missing:
        raise ValueError(missing)
    stages = [_of_stage(cfg, layout, stage, card, cluster, te=te, triton=triton) for stage in range(layout.pp)]
    return max(stages, key=lambda found: found.step_s)


@dataclass(frozen=True)
class _Pass:
    """Seconds of one micro-batch's forward and backward on a stage."""

    matrix: float
    memory: float
    small: float
    host: float

    @property
    def device(self) -> float:
        return self.matrix + self.memory + self.small


def _of_stage(
    cfg: RunConfig, layout: Layout, stage: int, card: Card, cluster: Cluster, *, te: bool, triton: bool
) -> StepTime:
    one = _pass(cfg, layout, stage, card, te=te, triton=triton)
    count = layout.num_microbatches
    graph = cfg.train.cuda_graph
    busy = one.device if graph else max(one.device, one.host)
    collectives = collectives_of_step(cfg, layout, stage)
    times = [(each, link_seconds(each, cluster)) for each in collectives]
    hidden = _hidden(cfg, times, busy)
    inside = [(each, seconds) for each, seconds in times if _within_node(each, cluster)]
    slowed = SLOWED * _hidden(cfg, inside, busy)
    network = sum(seconds for _, seconds in times)
    exposed = network - hidden
    bubble = (layout.pp - 1) / layout.vp * busy
    optimizer = _optimizer_seconds(cfg, layout, stage, card, te=te)
    matrix, memory, small = count * one.matrix + slowed, count * one.memory + optimizer, count * one.small
    rest = (GRAPH_HOST_MS if graph else HOST_STEP_MS) / 1e3
    host = rest if graph else count * one.host + rest
    device = count * busy + slowed + bubble + exposed + optimizer
    if graph and te and cfg.masters_in_adam:  # a step is launched before the gradient's norm of the last is known
        step, overlap, waits = max(device, host), min(device, host), host > device
    else:
        step, overlap, waits = device + rest, 0.0 if graph else count * min(one.device, one.host), False
    needs = {"network": exposed, "pipeline bubble": bubble}
    if waits or (not graph and one.host > one.device):
        needs["host launches"] = host
    else:
        needs |= {"matrix arithmetic": matrix, "memory traffic": memory, "small kernels": small}
    limit = max(needs, key=lambda name: needs[name])
    return StepTime(matrix, memory, small, host, network, exposed, bubble, overlap, step, limit)


def _optimizer_seconds(cfg: RunConfig, layout: Layout, stage: int, card: Card, *, te: bool) -> float:
    """Of the device: gradients are zeroed, but for tables that are updated by rows, and the own part is updated. Where
    masks make micro-batches unequal, megatron-core divides all gradients by the tokens, tables' too."""
    bandwidth, wide = card.memory_gb_per_s * COPY_EFFICIENCY * 1e9, cfg.parallel.grad_element_bytes
    dense, tables = parameters_of_rank(cfg, layout, stage)
    division = 2 * wide * (dense + tables) / bandwidth if cfg.data.eod_mask_loss else 0.0
    own = _updated_parameters(cfg, layout, stage)
    if not (te and cfg.masters_in_adam):
        return division + (wide * (dense + tables) + OPTIMIZER_BYTES * own) / bandwidth
    by_rows = 0.0
    if cfg.optimizer.deferred_table_updates and layout.gate_data_parallel == 1:
        own, tables, by_rows = own - tables, 0, _row_seconds(cfg, layout, tables, bandwidth)
    zeroing, norm, adam = wide * (dense + tables), wide * own, (_adam_bytes(cfg) + wide) * own
    return division + by_rows + (zeroing + norm) / bandwidth + adam / (card.memory_gb_per_s * ADAM_EFFICIENCY * 1e9)


def _adam_bytes(cfg: RunConfig) -> float:
    return HALVES_BYTES if cfg.optimizer.store_param_remainders else FUSED_BYTES


def _row_seconds(cfg: RunConfig, layout: Layout, tables: float, bandwidth: float) -> float:
    """Of updating `tables` entries by rows. A row that a step reads is updated before and after, and its gradient is
    read twice and zeroed; of the others one in SWEEP is updated."""
    readers = max(1, cfg.parallel.gate_group // (layout.tp * layout.cp))
    tokens = cfg.train.micro_batch_size * cfg.train.seq_length * layout.num_microbatches * readers
    read = min(1.0, tokens * unique_fraction(tokens, cfg.data.unique_fractions) / cfg.model.vocab_size)
    moved = read * (2 * _adam_bytes(cfg) + 3 * cfg.parallel.grad_element_bytes) + _adam_bytes(cfg) / SWEEP
    return tables * (moved / bandwidth + WAITING_UPDATE_S)


def _pass(cfg: RunConfig, layout: Layout, stage: int, card: Card, *, te: bool, triton: bool) -> _Pass:
    tokens = cfg.train.micro_batch_size * cfg.train.seq_length // layout.cp
    layers, last = layout.layers_per_stage, stage == layout.pp - 1
    hidden = cfg.model.hidden_size
    peak = card.bf16_tflops * 1e12 * MOST_OF_PEAK * hidden / (hidden + HALF)
    bandwidth = card.memory_gb_per_s * COPY_EFFICIENCY * 1e9
    saved = layer_activations(cfg, layout, te=te, triton=triton) * layers
    logits = (1 if te else 3) * tokens * cfg.model.vocab_size // layout.tp * 2 if last else 0
    again = {"none": 1.0, "selective": 1.1, "full": 4 / 3}[cfg.train.recompute]
    fused_gate = triton and cfg.parallel.unique_ids
    small = SMALL_KERNELS_MS + (0.0 if triton else HEADS_MS)
    small += GATE_MS if cfg.model.gated and not fused_gate else 0.0
    host = HOST_LAYER_MS["te" if te else "torch"]
    host += HOST_TENSOR_MS * (layout.tp > 1) + HOST_SEQUENCE_MS * cfg.parallel.sequence
    return _Pass(
        matrix=tokens * _flops(cfg, layout, tokens, last=last) / peak,
        memory=PASSES * (saved * again + logits) / bandwidth,
        small=small * layers * again / 1e3,
        host=host * layers * again / 1e3,
    )


def _flops(cfg: RunConfig, layout: Layout, tokens: int, *, last: bool) -> float:
    """Really computed for a token on a rank of the stage: distinct ids once, recomputation counted."""
    parts: dict[str, float] = dict(flops_per_token(cfg.model, cfg.train.seq_length).by_part)
    head = parts.pop("output_head")
    if cfg.parallel.unique_ids and "gate_projection" in parts:
        parts["gate_projection"] *= unique_fraction(tokens, cfg.data.unique_fractions)
    repeated = 0.0
    if cfg.train.recompute == "full":
        repeated = sum(parts.values())
    elif cfg.train.recompute == "selective":
        names = ("q_projection", "kv_down_projection", "kv_up_projection", "gate_projection")
        repeated = sum(parts.get(name, 0.0) for name in names)
        if cfg.model.attention == "mha":
            repeated = parts["attention_scores"]
    return ((3 * sum(parts.values()) + repeated) / layout.pp + 3 * head * last) / layout.tp


def _updated_parameters(cfg: RunConfig, layout: Layout, stage: int) -> float:
    dense, tables = parameters_of_rank(cfg, layout, stage)
    if cfg.optimizer.distributed:
        return dense / (layout.dp * layout.cp) + tables / layout.gate_data_parallel
    return dense + tables


def _hidden(cfg: RunConfig, times: list[tuple[Collective, float]], busy: float) -> float:
    """Seconds of the network behind forward (a third of a pass) and backward of one micro-batch.

    A step's gradients are complete in its last micro-batch only, those of the tables when its backward ends.
    """
    found = 0.0
    if cfg.parallel.overlap_grad_reduce:
        dense = sum(seconds for each, seconds in times if each.purpose == "dense gradients")
        found += min(dense, busy * 2 / 3)
    if cfg.parallel.overlap_param_gather:
        weights = sum(seconds for each, seconds in times if each.purpose.endswith("weights"))
        found += min(weights, busy / 3)
    return found
