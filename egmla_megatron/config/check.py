"""Proves that a configuration can run on a number of ranks, before any process group or torch import.

Every rule raises UserError with what is wrong, what was got, what is allowed and how to fix it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from egmla_megatron.config.check_model import check_model
from egmla_megatron.config.check_profile import check_profile
from egmla_megatron.config.check_switches import check_switches
from egmla_megatron.config.ranges import check_ranges
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.config.workable import divisors, nearest, nearest_divisor, nearest_multiple, refuse

__all__ = ["Layout", "check_config", "micro_batch_unit"]


@dataclass(frozen=True)
class Layout:
    """How the ranks of one run are used. Sizes in ranks unless said otherwise."""

    world_size: int
    tp: int
    pp: int
    vp: int  # model chunks per stage
    cp: int
    dp: int  # data-parallel replicas of the dense weights
    gate_group: int  # W: ranks that share one gating table
    gate_data_parallel: int  # replicas of every slice of a gating table
    num_microbatches: int  # forward passes per rank and optimizer step
    layers_per_stage: int  # layers

    def summary(self) -> str:
        """For a person to read."""
        chunks = f" x {self.vp} chunks" if self.vp > 1 else ""
        context = f" CP {self.cp}" if self.cp > 1 else ""
        ranks = f"{self.world_size} rank{'' if self.world_size == 1 else 's'}"
        count = f"{self.num_microbatches} micro-batch{'' if self.num_microbatches == 1 else 'es'} of a rank a step"
        sizes = f"TP {self.tp} PP {self.pp}{chunks}{context} DP {self.dp} gate group {self.gate_group}"
        return f"{ranks} as {sizes}, {count}"


def check_config(cfg: RunConfig, world_size: int) -> Layout:
    """Returns the layout of `cfg` on `world_size` ranks. Raises UserError when it cannot run."""
    check_ranges(cfg)
    check_model(cfg.model)
    dp = _data_parallel_size(cfg, world_size)
    _check_tensor(cfg)
    _check_layers(cfg)
    _check_sequence(cfg)
    _check_gate_group(cfg, world_size)
    _check_batch(cfg, dp)
    _check_schedule(cfg)
    check_switches(cfg)
    check_profile(cfg, world_size)
    parallel, train = cfg.parallel, cfg.train
    return Layout(
        world_size=world_size,
        tp=parallel.tensor,
        pp=parallel.pipeline,
        vp=parallel.virtual_pipeline,
        cp=parallel.context,
        dp=dp,
        gate_group=parallel.gate_group,
        gate_data_parallel=world_size // parallel.pipeline // parallel.gate_group,
        num_microbatches=train.global_batch_size // (train.micro_batch_size * dp),
        layers_per_stage=cfg.model.num_layers // parallel.pipeline,
    )


def micro_batch_unit(cfg: RunConfig) -> int:
    """Returns what the number of micro-batches must be a multiple of: interleaved stages take one each at a time."""
    return cfg.parallel.pipeline if cfg.parallel.virtual_pipeline > 1 else 1


def _data_parallel_size(cfg: RunConfig, world_size: int) -> int:
    parallel = cfg.parallel
    if world_size < 1:
        refuse("number of ranks", world_size, "at least 1", "start at least one process")
    model_parallel = parallel.tensor * parallel.pipeline * parallel.context
    if world_size % model_parallel:
        refuse(
            "number of ranks is no multiple of parallel.tensor x parallel.pipeline x parallel.context",
            f"{world_size} ranks for {parallel.tensor} x {parallel.pipeline} x {parallel.context}",
            f"multiples of {model_parallel}",
            f"start {nearest_multiple(world_size, model_parallel)} ranks, or make parallel.tensor, "
            "parallel.pipeline or parallel.context smaller",
        )
    return world_size // model_parallel


def _check_tensor(cfg: RunConfig) -> None:
    """Everything that is cut into parallel.tensor equal pieces."""
    model, tp = cfg.model, cfg.parallel.tensor
    pieces = {
        "model.num_attention_heads": model.num_attention_heads,
        "model.intermediate_size": model.intermediate_size,
        "model.vocab_size": model.vocab_size,
    }
    if model.attention == "mla":
        pieces["model.kv_lora_rank + model.qk_rope_head_dim"] = model.kv_lora_rank + model.qk_rope_head_dim
        if model.q_lora_rank:
            pieces["model.q_lora_rank"] = model.q_lora_rank
    workable = [n for n in divisors(model.num_attention_heads) if not any(size % n for size in pieces.values())]
    for name, size in pieces.items():
        if size % tp:
            refuse(
                f"parallel.tensor does not divide {name} = {size}",
                tp,
                ", ".join(map(str, workable)),
                f"set parallel.tensor={nearest(tp, workable)}",
            )


def _check_layers(cfg: RunConfig) -> None:
    layers, stages, chunks = cfg.model.num_layers, cfg.parallel.pipeline, cfg.parallel.virtual_pipeline
    if chunks > 1 and stages == 1:
        refuse(
            "parallel.virtual_pipeline interleaves pipeline stages, and there is one",
            f"parallel.virtual_pipeline={chunks} with parallel.pipeline=1",
            "parallel.pipeline > 1",
            "set parallel.virtual_pipeline=1",
        )
    if layers % stages:
        refuse(
            f"parallel.pipeline does not divide model.num_layers = {layers}",
            stages,
            ", ".join(map(str, divisors(layers))),
            f"set parallel.pipeline={nearest_divisor(stages, layers)}",
        )
    if layers // stages % chunks:
        refuse(
            f"parallel.virtual_pipeline does not divide the {layers // stages} layers of a stage",
            chunks,
            ", ".join(map(str, divisors(layers // stages))),
            f"set parallel.virtual_pipeline={nearest_divisor(chunks, layers // stages)}",
        )


def _check_sequence(cfg: RunConfig) -> None:
    parallel, train, model = cfg.parallel, cfg.train, cfg.model
    if parallel.sequence and parallel.tensor == 1:
        refuse(
            "parallel.sequence splits the sequence over the tensor-parallel ranks, and there is one",
            "parallel.sequence=true with parallel.tensor=1",
            "parallel.sequence=true with parallel.tensor > 1",
            "set parallel.sequence=false",
        )
    _check_sequence_parts(cfg)
    if train.seq_length > model.max_position_embeddings:
        kind = "learned positions" if model.attention == "mha" else "context of the model (RoPE is not scaled)"
        refuse(
            f"train.seq_length is beyond the {kind}, model.max_position_embeddings = {model.max_position_embeddings}",
            train.seq_length,
            f"up to {model.max_position_embeddings}",
            f"set train.seq_length={model.max_position_embeddings} or model.max_position_embeddings={train.seq_length}",
        )


def _check_sequence_parts(cfg: RunConfig) -> None:
    """Two chunks per context-parallel rank, and both together in equal pieces for the tensor-parallel ranks."""
    context, length = cfg.parallel.context, cfg.train.seq_length
    tensor = cfg.parallel.tensor if cfg.parallel.sequence else 1
    unit = context * (math.lcm(2, tensor) if context > 1 else tensor)
    whats = [f"2 x parallel.context = {2 * context}"] if context > 1 else []
    if tensor > 1:
        whats.append(("parallel.context x " if context > 1 else "") + f"parallel.tensor = {context * tensor}")
    if length % unit:
        refuse(
            f"train.seq_length is no multiple of {' and '.join(whats)}"
            + (" (parallel.sequence=true)" if tensor > 1 else ""),
            length,
            f"multiples of {unit}",
            f"set train.seq_length={nearest_multiple(length, unit)}",
        )


def _check_gate_group(cfg: RunConfig, world_size: int) -> None:
    model, group = cfg.model, cfg.parallel.gate_group
    if group == 1:
        return
    if not model.gated:
        refuse(
            "parallel.gate_group shares gating tables, and this model has none",
            f"parallel.gate_group={group} with model.attention={model.attention}, model.gate={model.gate}",
            "1",
            "set parallel.gate_group=1",
        )
    per_stage = world_size // cfg.parallel.pipeline
    tensor, context = cfg.parallel.tensor, cfg.parallel.context
    whole = [n for n in divisors(per_stage) if _whole_groups(n, tensor, context)]
    workable = [n for n in whole if model.kv_emb_dim % n == 0]
    fix = f"set parallel.gate_group={nearest(group, workable)}"
    allowed = ", ".join(map(str, workable))
    if per_stage % group:
        refuse(f"parallel.gate_group does not divide the {per_stage} ranks of one stage", group, allowed, fix)
    if model.kv_emb_dim % group:
        refuse(f"parallel.gate_group does not divide model.kv_emb_dim = {model.kv_emb_dim}", group, allowed, fix)
    if group not in whole:
        refuse(
            f"parallel.gate_group mixes replicas: its {group} ranks would be neither part of a tensor-parallel group "
            f"of {tensor} (x {context} context-parallel) nor several whole ones",
            group,
            allowed,
            fix,
        )


def _whole_groups(group: int, tensor: int, context: int) -> bool:
    """Whether a gate group is made of equal parts of model-parallel groups, or of whole ones: ranks count TP first,
    then CP, then DP, and other groups would cut through the replicas of a sequence."""
    for size in (tensor, context):
        if size % group == 0:
            return True
        if group % size:
            return False
        group //= size
    return True


def _check_batch(cfg: RunConfig, dp: int) -> None:
    train = cfg.train
    per_pass = train.micro_batch_size * dp
    if train.global_batch_size % per_pass:
        refuse(
            f"train.global_batch_size is no multiple of train.micro_batch_size x data-parallel ranks = "
            f"{train.micro_batch_size} x {dp}",
            train.global_batch_size,
            f"multiples of {per_pass}",
            f"set train.global_batch_size={nearest_multiple(train.global_batch_size, per_pass)}",
        )
    unit = micro_batch_unit(cfg)
    if train.global_batch_size // per_pass % unit:
        refuse(
            f"an interleaved pipeline (parallel.virtual_pipeline={cfg.parallel.virtual_pipeline}) needs a number of "
            f"micro-batches that is a multiple of parallel.pipeline = {unit}",
            f"{train.global_batch_size // per_pass} micro-batches of {train.micro_batch_size} x {dp} sequences",
            f"train.global_batch_size in multiples of {per_pass * unit}",
            f"set train.global_batch_size={nearest_multiple(train.global_batch_size, per_pass * unit)}, "
            "or parallel.virtual_pipeline=1",
        )


def _check_schedule(cfg: RunConfig) -> None:
    optimizer, total = cfg.optimizer, cfg.total_steps
    if optimizer.warmup_steps > total:
        refuse(
            f"optimizer.warmup_steps is longer than the run of {total} steps",
            optimizer.warmup_steps,
            f"0 to {total}",
            f"set optimizer.warmup_steps={total // 10}, or train longer (train.steps, train.tokens)",
        )
    if optimizer.schedule != "wsd":
        return
    longest = total - optimizer.warmup_steps
    if not 1 <= optimizer.decay_steps <= longest:
        refuse(
            "optimizer.decay_steps is the length of the final decay of schedule wsd",
            optimizer.decay_steps,
            f"1 to {longest} (the steps after the warmup)",
            f"set optimizer.decay_steps={max(1, longest // 5)}",
        )
