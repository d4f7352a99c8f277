"""The configuration of a run as frozen dataclasses, one per YAML section.

Units stand in the field comments. A value of this module is plain data: no torch, no megatron-core, so
that `tools/plan.py` and the launch scripts can read a configuration in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ProfileConfig",
    "Recompute",
    "RunConfig",
    "RunSection",
    "TrainConfig",
]

Recompute = Literal["none", "selective", "full"]
_DTYPE_BYTES = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True)
class RunSection:
    """Where a run lives and what makes it repeatable."""

    name: str = "egmla"  # label in logs, reports and wandb
    dir: str = "runs/egmla"  # folder of the run: config.yaml, metrics.jsonl, checkpoints/, report
    seed: int = 1234  # seeds the weights, the data order and dropout
    deterministic: bool = False  # refuse GPU algorithms whose result differs from run to run (a CPU run always repeats)


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of one model. Sizes count elements; the paper's symbols stand in parentheses."""

    name: str = "eg_mla"
    attention: Literal["mla", "mha"] = "mla"  # mha: the GPT-2 shape (LayerNorm, GELU, biases, learned positions)
    num_layers: int = 12
    hidden_size: int = 768  # elements of the residual stream
    num_attention_heads: int = 12  # (n_h)
    intermediate_size: int = 1920  # width of the MLP, 2.5 x hidden_size in the paper's models
    qk_nope_head_dim: int = 64  # per head, without position (d_h)
    qk_rope_head_dim: int = 64  # per head of q, shared by all heads of k (d_h^R)
    v_head_dim: int = 64  # per head; for mha: the head dimension of q, k and v
    q_lora_rank: int = 0  # low rank of q, 0: full-rank q_proj without a norm
    kv_lora_rank: int = 64  # elements of the cached latent (d_c)
    kv_emb_dim: int = 256  # columns of a layer's gating table; 0 exactly when gate is none
    gate: Literal["mul", "add", "none"] = "mul"  # none: plain MLA
    gate_norm: bool = True  # LayerNorm over all heads after the gate
    kv_group_size: int = 1  # layers that share one latent (appendix H); only 1 is implemented
    vocab_size: int = 50304  # rows of the embedding and of every gating table, padding included
    max_position_embeddings: int = 1024  # tokens of the longest context; for mha also rows of the learned positions
    tie_word_embeddings: bool = True
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    gate_norm_eps: float = 1e-5
    init_std: float = 0.02  # std of every linear weight and of the token embedding
    gate_table_init_std: float = 1.0  # std of a table's entries; the projection is scaled so that gates have std 1
    attention_dropout: float = 0.0  # probability
    hidden_dropout: float = 0.0  # probability

    @property
    def gated(self) -> bool:
        """True when the layers read gating tables."""
        return self.attention == "mla" and self.gate != "none"


@dataclass(frozen=True)
class DataConfig:
    """Training text as megatron-core indexed datasets (PREFIX.bin and PREFIX.idx)."""

    train: tuple[str, ...] = ()  # prefixes, or weight, prefix, weight, prefix, ...
    valid: tuple[str, ...] = ()  # same form; empty: no evaluation
    tokenizer: str = ""  # folder with Hugging Face tokenizer files, or a sentencepiece .model; goes into the export
    cache_dir: str = ""  # sample index caches, on a shared or a node's own disk; empty: RUN_DIR/data_cache
    num_workers: int = 2  # loader processes per rank, 0: in the trainer
    eod_mask_loss: bool = False  # no loss at the end-of-document token, that is for the first token of a document
    reset_position_ids: bool = False  # positions count from each document's start; only for learned positions (mha)
    reset_attention_mask: bool = False  # attention within documents only; refused, no attention kernel here honours it
    # for predictions alone: shares of distinct ids among 1024, 2048, 4096 ... tokens; empty: measured in the data where
    # they can be read, else those of English
    unique_fractions: tuple[float, ...] = ()
    eod_id: int = -1  # end-of-document id; -1: taken from the manifest PREFIX.json beside the data


@dataclass(frozen=True)
class TrainConfig:
    """The loop: batch, length, precision and what happens when something goes wrong."""

    seq_length: int = 1024  # tokens
    micro_batch_size: int = 8  # sequences per rank and forward pass
    global_batch_size: int = 384  # sequences per optimizer step over all ranks
    steps: int = 0  # optimizer steps; 0: tokens / (global_batch_size * seq_length)
    tokens: int = 50_000_000_000  # token budget, used when steps is 0
    precision: Literal["bf16", "fp32"] = "bf16"
    # linear layers of the blocks in FP8 (Transformer Engine); attention, gate, norms, embedding and head stay in bf16
    fp8: Literal["none", "tensorwise"] = "none"
    eval_interval: int = 500  # steps between evaluations, 0: only at the end
    eval_batches: int = 20  # global batches per evaluation
    recompute: Recompute = "none"
    # forward and backward of a step as one CUDA graph: the host, often slower than the GPU, only replays it; files and
    # overrides may say auto: true on a GPU, unless another setting rules it out (check_switches.py: graph_obstacles)
    cuda_graph: bool = False
    max_bad_steps: int = 10  # stop after so many steps with NaN/Inf loss or gradients in a row
    exit_after_steps: int = 0  # stop cleanly after so many steps of this start (saved if checkpoint.at_end), 0: never
    peer_timeout_s: float = 40.0  # seconds without a sign of life before a rank counts as dead, 0: never
    collective_timeout_s: float = 600.0  # seconds before a collective gives up

    @property
    def element_bytes(self) -> int:
        """Of a weight or an activation."""
        return _DTYPE_BYTES[self.precision]


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and the learning-rate schedule."""

    lr: float = 6e-4  # peak
    min_lr_ratio: float = 0.1  # final lr / peak lr
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup_steps: int = 700  # steps
    decay_steps: int = 0  # steps over which lr falls, 0: all steps of the run; wsd: length of the final decay
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1  # 0 on norms, biases and gating tables, always
    clip_grad: float = 1.0  # global gradient norm, 0: no clipping
    gate_table_lr_ratio: float = 1.0  # lr of the gating tables / lr
    distributed: bool = True  # shard the optimizer states over the data-parallel ranks
    # Adam keeps the fp32 master weights of bf16 weights and writes both at once, and the device decides whether: the
    # host launches a step before the last one is done (GPUs with Transformer Engine, distributed only)
    fused_master_weights: bool = True
    # of a master weight keep the 16 bits that its bf16 weight lacks, 2 bytes a parameter less; checkpoints still have
    # fp32 (with fused_master_weights)
    store_param_remainders: bool = True
    # rows of the gating tables that a step did not read are updated later, to the same bits: when they are read, and at
    # the latest 128 steps on (with fused_master_weights, where a rank has the whole optimizer state of its tables)
    deferred_table_updates: bool = True


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is laid over the ranks (sizes in ranks) and by whom the layers are computed."""

    tensor: int = 1  # TP
    pipeline: int = 1  # PP
    context: int = 1  # CP: ranks that share every sequence, two of its 2 x CP chunks each
    virtual_pipeline: int = 1  # model chunks per stage, 1: plain 1F1B, more: interleaved 1F1B
    sequence: bool = False  # sequence parallelism over the TP ranks
    gate_group: int = 1  # W: ranks that share one gating table, from TP x CP x DP
    # how the group brings gate embeddings home: each rank's own tokens' columns, or everybody's by one all-gather
    gate_exchange: Literal["all_to_all", "all_gather"] = "all_to_all"
    gate_granularity: Literal["fused", "per_layer"] = "fused"  # one collective for all layers of a stage, or one each
    unique_ids: bool = True  # look up, exchange and project every distinct token id of a micro-batch once
    implementation: Literal["auto", "te", "torch"] = "auto"  # auto: te where it is importable and CUDA is there
    attention_backend: Literal["auto", "te_fused", "cudnn", "flash", "efficient", "math"] = "auto"
    kernels: Literal["auto", "triton", "torch"] = "auto"  # of gate, latent and heads; auto: triton on a GPU
    # the layers add weight gradients to the main gradients themselves (with Transformer Engine)
    fused_grad_accumulation: bool = True
    grad_reduce_dtype: Literal["fp32", "bf16"] = "fp32"  # gradients in memory and on the wire; bf16: half of the bytes
    overlap_grad_reduce: bool = False  # reduce gradients while backward runs
    grad_bucket_params: int = 0  # parameters in one message of an overlapped reduction, 0: megatron-core's 40M
    overlap_param_gather: bool = False  # gather distributed-optimizer parameters while forward runs

    @property
    def grad_element_bytes(self) -> int:
        """Of an element of the gradients, in memory and on the wire."""
        return _DTYPE_BYTES[self.grad_reduce_dtype]


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save and what to keep."""

    interval_steps: int = 1000  # steps, 0: never by step
    interval_minutes: float = 0.0  # minutes, 0: never by time
    at_end: bool = True  # save after the last step of a start; false only for measurements (signals always save)
    keep: int = 3  # newest complete checkpoints kept, 0: all
    keep_every_steps: int = 0  # additionally keep every checkpoint whose step this divides, 0: none
    resume: Literal["auto", "required", "never"] = "auto"  # auto: newest complete checkpoint of the run if there is one
    # a run without complete checkpoints of its own starts from this checkpoint folder (or newest one of a run folder),
    # with its step, data position and optimizer (one made by convert_checkpoint.py from-hf: with weights and step);
    # its own newest checkpoint wins
    load: str = ""
    verify: bool = True  # before loading, read all of a checkpoint once and compare checksums (0.3 s per GB and core)
    asynchronous: bool = True  # write in the background on GPUs (CPU runs always write in the foreground)


@dataclass(frozen=True)
class LoggingConfig:
    """What is reported where."""

    interval_steps: int = 1  # steps between log lines, in all sinks; bad steps and a start's last always have one
    tensorboard: bool = True
    wandb: Literal["disabled", "offline", "online"] = "offline"
    wandb_project: str = "egmla"
    warmup_steps: int = 3  # first steps of each start that do not count in the throughput
    step_times: bool = True  # split every step's time into parts and find the slowest rank (see train/events.py)


@dataclass(frozen=True)
class ProfileConfig:
    """A window of steps that torch.profiler records, one Chrome trace per rank in RUN_DIR/profile."""

    steps: tuple[int, ...] = ()  # first and last step (counted from 1); empty: no profile
    ranks: tuple[int, ...] = (0,)  # that record


@dataclass(frozen=True)
class RunConfig:
    """Everything one run needs; `load_config` makes it, `check_config` proves that it can run."""

    run: RunSection = field(default_factory=RunSection)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        per_step = self.train.global_batch_size * self.train.seq_length
        return self.train.steps or max(1, -(-self.train.tokens // per_step))

    @property
    def masters_in_adam(self) -> bool:
        """Whether Adam is to keep the master weights, where it is Transformer Engine's; the device then decides."""
        optimizer = self.optimizer
        return optimizer.fused_master_weights and optimizer.distributed and self.train.precision == "bf16"
