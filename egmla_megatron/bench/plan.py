"""Everything that can be decided before torch is imported, so that mistakes cost no time."""

from __future__ import annotations

from dataclasses import dataclass

from egmla_megatron.bench.options import BenchOptions, base_config
from egmla_megatron.bench.schedule import Schedule
from egmla_megatron.bench.variants import Variant, variant_config
from egmla_megatron.config.check import Layout, check_config
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.config.workable import divisors
from egmla_megatron.data.verify import verify_prefix
from egmla_megatron.errors import UserError

__all__ = ["BenchPlan", "make_plan"]

_PROBED_STEPS = 3


@dataclass(frozen=True)
class BenchPlan:
    """What runs on the ranks."""

    options: BenchOptions
    ranks: int
    base: RunConfig
    schedule: Schedule
    configs: dict[Variant, RunConfig]
    layouts: dict[Variant, Layout]


def make_plan(options: BenchOptions, ranks: int, *, cuda: bool) -> BenchPlan:
    """The plan for `ranks` ranks.

    Raises:
        UserError: a variant cannot run on them.
    """
    if ranks == 1 and any(variant.sharded for variant in options.variants):
        raise UserError(
            "ranks: got 1, allowed 2 or more for sharded tables; start it by launch/bench_sharding.sh on 2 GPUs "
            "or more, or add --nodes-on-this-machine 2"
        )
    schedule = Schedule(options.warmup, options.steps, min(_PROBED_STEPS, options.steps))
    base = base_config(options, ranks, cuda=cuda, steps=schedule.total)
    columns = base.model.kv_emb_dim
    if columns % ranks and any(variant.sharded for variant in options.variants):
        raise UserError(
            f"ranks: got {ranks}, which does not divide model.kv_emb_dim = {columns}, allowed "
            f"{', '.join(str(n) for n in divisors(columns) if n > 1)}; start so many, or choose --variants vanilla"
        )
    for prefix in base.data.train:
        verify_prefix(prefix, vocab_size=base.model.vocab_size)
    configs = {variant: variant_config(base, variant, ranks) for variant in options.variants}
    layouts = {variant: check_config(cfg, ranks) for variant, cfg in configs.items()}
    return BenchPlan(options, ranks, base, schedule, configs, layouts)
