"""Loss of a checkpoint on whole data sets, by megatron-core's forward pass, on any layout."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from egmla_megatron.checkpoint.manifest import find_checkpoint, read_manifest
from egmla_megatron.cli import check_count
from egmla_megatron.config.check import Layout, check_config, micro_batch_unit
from egmla_megatron.config.load import dump_yaml, from_dict, load_config
from egmla_megatron.config.schema import OptimizerConfig, ParallelConfig, RunConfig
from egmla_megatron.errors import UserError
from egmla_megatron.train.machine import check_machine

__all__ = ["Evaluation", "Score", "as_rows", "as_table", "measure", "plan_evaluation"]

_SETTINGS = (
    "parallel.",
    "train.micro_batch_size",
    "train.seq_length",
    "train.precision",
    "train.fp8",
    "data.eod_",
    "data.cache_dir",
)


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated, how, and on what."""

    checkpoint: Path
    step: int  # optimizer steps of the checkpoint
    runs: Mapping[str, RunConfig]  # prefix of a data set -> a configuration whose validation data it is
    layout: Layout
    sequences: int  # of each data set at most, 0: all


@dataclass(frozen=True)
class Score:
    """One data set."""

    data: str  # prefix
    val_loss: float  # nats per token
    val_ppl: float  # exp(val_loss)
    tokens: int  # scored
    sequences: int
    left_out_sequences: int  # the last ones, less than a micro-batch for every rank
    seconds: float


def plan_evaluation(
    where: str, data: Sequence[str], overrides: Sequence[str], sequences: int, ranks: int
) -> Evaluation:
    """Without torch: everything that can be wrong is found here.

    Args:
        where: a checkpoint folder, or a run folder (its newest complete checkpoint).
        data: prefixes of data sets, each scored by itself.
        overrides: section.key=value over the checkpoint's own configuration; layout, micro-batch and length only.
        sequences: of each data set at most, 0: all.

    Raises:
        UserError: no checkpoint, data that do not fit it, other settings, a layout that cannot be.
    """
    check_count("--sequences", sequences, 0, 2**31 - 1)
    for override in overrides:
        if not override.startswith(_SETTINGS):
            raise UserError(
                f"command line: got {override}, allowed {', '.join(f'{name}...' for name in _SETTINGS)}; the rest is "
                "the checkpoint's"
            )
    path = find_checkpoint(Path(where))
    manifest = read_manifest(path)
    runs = {prefix: _run(manifest.config, prefix, overrides, ranks) for prefix in data}
    first = next(iter(runs.values()))
    layout = check_config(first, ranks)
    check_machine(first)
    return Evaluation(path, manifest.step, runs, layout, sequences)


def _run(saved: Mapping[str, Any], prefix: str, overrides: Sequence[str], ranks: int) -> RunConfig:
    """The checkpoint's configuration, with `prefix` as its validation data and a layout of data parallelism."""
    from egmla_megatron.data.verify import verify_prefix

    cfg = from_dict(saved)
    cache = str(Path(tempfile.gettempdir(), f"egmla-evaluate-{os.getuid()}"))
    plain = ParallelConfig(implementation=cfg.parallel.implementation, kernels=cfg.parallel.kernels)
    train = replace(cfg.train, recompute="none", cuda_graph=False, steps=1)
    data = replace(cfg.data, train=(prefix,), valid=(prefix,), cache_dir=cache, num_workers=0)
    unused = OptimizerConfig(distributed=False, warmup_steps=0)
    cfg = replace(cfg, parallel=plain, train=train, data=data, optimizer=unused)
    cfg = _with(cfg, overrides)
    sizes = cfg.parallel.tensor * cfg.parallel.pipeline * cfg.parallel.context
    at_once = cfg.train.micro_batch_size * max(1, ranks // sizes) * micro_batch_unit(cfg)
    verify_prefix(prefix, vocab_size=cfg.model.vocab_size)
    return replace(cfg, train=replace(cfg.train, global_batch_size=at_once))


def _with(cfg: RunConfig, overrides: Sequence[str]) -> RunConfig:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint.yaml")
        path.write_text(dump_yaml(cfg))
        return load_config(path, overrides)


def measure(evaluation: Evaluation) -> list[Score]:
    """Scores of all data sets, the same on every rank. Every rank calls it.

    Raises:
        UserError: less than one sequence, weights that do not fit.
    """
    from egmla_megatron.checkpoint.load import read_weights
    from egmla_megatron.model.build import build_model
    from egmla_megatron.parallel.world import close_world, open_world, seed_everything

    first = next(iter(evaluation.runs.values()))
    world = open_world(first, evaluation.layout)
    seed_everything(first.run.seed, world)
    built = build_model(first, world)
    read_weights(built, world, evaluation.checkpoint)
    scores = [_score(cfg, world, built, prefix, evaluation.sequences) for prefix, cfg in evaluation.runs.items()]
    close_world()
    return scores


def _score(cfg: RunConfig, world: Any, built: Any, prefix: str, most: int) -> Score:
    from egmla_megatron.data.batch import batch_iterator
    from egmla_megatron.data.dataset import build_validation, micro_batch_indices
    from egmla_megatron.train.setup import data_share
    from egmla_megatron.train.step import evaluate

    dataset = build_validation(cfg)
    available = min(len(dataset), most or len(dataset))
    at_once, share = cfg.train.global_batch_size, data_share(cfg, world)
    samples = available // at_once * at_once
    if not samples:
        raise UserError(
            f"{prefix}: got {available} sequences of {cfg.train.seq_length} tokens, allowed at least {at_once} (a "
            "micro-batch for every rank); lower train.micro_batch_size or train.seq_length"
        )
    started = time.perf_counter()
    micro_batch, dp = cfg.train.micro_batch_size, world.layout.dp
    indices = micro_batch_indices(0, samples, available, micro_batch=micro_batch, dp_ranks=share.dp_ranks, dp_size=dp)
    batches = batch_iterator(dataset, indices, world.device, num_workers=0, share=share)
    loss = evaluate(cfg, world, list(built.wrapped), batches, samples // (micro_batch * dp))
    return Score(
        data=prefix,
        val_loss=loss,
        val_ppl=math.exp(loss) if loss < 700 else math.inf,
        tokens=samples * cfg.train.seq_length,
        sequences=samples,
        left_out_sequences=available - samples,
        seconds=time.perf_counter() - started,
    )


def as_rows(evaluation: Evaluation, scores: Sequence[Score]) -> dict[str, Any]:
    """For --json."""
    return {
        "checkpoint": str(evaluation.checkpoint),
        "step": evaluation.step,
        "layout": asdict(evaluation.layout),
        "scores": [asdict(score) for score in scores],
    }


def as_table(evaluation: Evaluation, scores: Sequence[Score]) -> list[str]:
    """Lines of Markdown."""
    lines = [
        f"{evaluation.checkpoint}, step {evaluation.step}",
        "",
        "| data | val_loss (nats per token) | val_ppl | tokens | sequences | left out | seconds |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for score in scores:
        lines.append(
            f"| {score.data} | {score.val_loss:.5f} | {score.val_ppl:.4f} | {score.tokens:,} | "
            f"{score.sequences:,} | {score.left_out_sequences} | {score.seconds:.1f} |"
        )
    return lines
