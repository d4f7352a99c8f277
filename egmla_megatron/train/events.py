"""The events of a run and the names in them: the same on the console, in metrics.jsonl, TensorBoard and wandb.

A name ends in its unit: `_s` seconds, `_mib` MiB (2**20 bytes), `_per_second`, `_rank` a rank's number. Names without
one are counts, or have the unit said here. The console shows the main ones, with the unit behind the value. TensorBoard
and wandb take the numbers of `step` and `eval`. A value that is not known is null in metrics.jsonl and left out there;
besides, every line of metrics.jsonl has `kind` and `unix_time_s`.

The `time_*_s` of a step are rank 0's and add up to its work on the device (train/step_times.py says from where to
where), in which `step_time_s` lies around all of it. The slowest rank is the one that was busy for longest with
data, forward and backward, on average over the steps since the last line (so of steps before this one: a rank speaks
while it works). Waiting for other ranks is no work, except for those of its tensor- and context-parallel groups, which
lie in one node as a rule, and for parameters (parallel.overlap_param_gather). With `train.cuda_graph` only a rank's
loading is known.

The peak memory of a run, in its report and in the quickstart's result, is the largest of the lines of steps and ends of
all its starts (report/peaks.py); that of one start stands on the console in the line of its end.
"""

from __future__ import annotations

__all__ = ["EVENTS"]

_RATES = {
    "tokens_per_second": "tokens of the global batch / step_time_s",
    "tokens_per_second_per_rank": "the same per GPU (CPU: process)",
    "tflops_per_second_per_rank": "10**12 model FLOP/s of a rank: forward and backward, gate counted, causal attention "
    "once, nothing twice for recomputation",
    "mfu": "the same / dense bf16 peak of the card, 0 to 1; null where the peak is not known",
}

# kind -> name -> what it is
EVENTS: dict[str, dict[str, str]] = {
    "start": {
        "step": "optimizer steps done",
        "total_steps": "of the whole run",
        "resumed_from": "checkpoint folder, or empty",
        "passed_over": "newer checkpoints of the run that are damaged, each with the reason",
        "world_size": "ranks",
        "device": "name of the card, or cpu",
        "implementation": "whose layers: te or torch",
        "attention_backend": "the attention kernel",
        "kernels": "of gate and heads: triton or torch",
        "cuda_graph": "whether forward and backward of a step are one CUDA graph",
        "precision": "bf16 or fp32",
        "layout": "ranks along tp, pp, cp, dp, gate group; micro-batches",
        "active_params": "parameters without gating tables",
        "gate_table_params": "parameters of the gating tables",
        "tokenizer_sha256": "of the tokenizer of the training data; null where its manifests do not say, or differ",
        "predicted_memory_mib": "of the rank that needs most, by part; null on a CPU without /proc",
    },
    "step": {
        "step": "optimizer steps done",
        "total_steps": "of the whole run",
        "loss": "nats per token, mean over the global batch",
        "grad_norm": "before clipping",
        "lr": "learning rate of the step",
        "tokens": "trained on so far",
        "skipped": "true: the gradient was not finite, the weights were left alone",
        "step_time_s": "to the end of the step, from its beginning or, launched ahead, from the end of the one before",
        "time_data_s": "waiting for micro-batches",
        "time_forward_backward_s": "forward and backward without the other parts",
        "time_exchange_s": "waiting for the exchange of gate embeddings; null inside a CUDA graph",
        "time_gradient_sync_s": "reducing gradients behind the last backward; null inside a CUDA graph",
        "time_optimizer_s": "norm, clipping, update, gathering of parameters",
        **_RATES,
        "peak_memory_mib": "most allocated so far (CPU: resident) of the worst rank",
        "peak_memory_rank": "that rank",
        "reserved_memory_mib": "most that torch's allocator took of a GPU so far, of the worst rank; null on a CPU",
        "reserved_memory_rank": "that rank",
        "slowest_rank": "the straggler; null in the first step, launched ahead also in the second, or without "
        "logging.step_times",
        "slowest_node": "its host name",
        "slowest_rank_busy_s": "its mean time of work in a step",
        "fastest_rank_busy_s": "that of the fastest rank",
        "unique_id_fraction": "distinct ids per token of a micro-batch, rank 0's mean since the last line",
        "eta_s": "until the last step, without evaluations and checkpoints",
    },
    "eval": {
        "step": "optimizer steps done",
        "val_loss": "nats per token",
        "val_ppl": "exp(val_loss)",
        "tokens": "that were scored",
        "seconds": "it took",
    },
    "checkpoint": {
        "step": "optimizer steps done",
        "path": "its folder",
        "seconds": "from the order to save until it is complete; training goes on meanwhile on GPUs",
    },
    "profile": {"step": "optimizer steps done", "path": "a trace of rank 0"},
    "end": {
        "step": "optimizer steps done",
        "reason": "why it ended",
        "signal": "that stopped it, or 0",
        "skipped_steps": "of this start",
        **{name: f"{what}; mean over the counted steps, null without one" for name, what in _RATES.items()},
        "training_s": "steps that count in the throughput",
        "warmup_s": "the first logging.warmup_steps of this start, which do not",
        "evaluation_s": "evaluations",
        "checkpoint_s": "for which checkpoints held training up, not what was written in the background",
        "profile_s": "profiled steps, and writing their trace",
        "total_s": "from before the first step to the end",
        "peak_memory_mib_by_rank": "most allocated (CPU: resident), of every rank",
        "reserved_memory_mib_by_rank": "most that torch's allocator took, of every rank; null on a CPU",
    },
}
