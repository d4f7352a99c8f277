"""What is compared: how the gating tables are laid over the ranks, and how their rows travel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from egmla_megatron.config.schema import RunConfig
from egmla_megatron.errors import UserError

__all__ = ["VARIANTS", "Variant", "chosen", "variant_config"]


@dataclass(frozen=True)
class Variant:
    """One way to hold the tables; the fields are the switches of `ParallelConfig`."""

    name: str
    sharded: bool  # over all ranks by dimension; else every rank holds whole tables and their gradients are reduced
    unique_ids: bool
    exchange: Literal["all_to_all", "all_gather"] = "all_to_all"
    granularity: Literal["fused", "per_layer"] = "fused"

    def gate_group(self, world_size: int) -> int:
        """Ranks that share one table."""
        return world_size if self.sharded else 1


def _variants() -> tuple[Variant, ...]:
    """Replicated ones first, so that the process groups change once in a round."""
    found = [Variant("vanilla", False, False), Variant("vanilla_unique", False, True)]
    exchanges: tuple[Literal["all_to_all", "all_gather"], ...] = ("all_to_all", "all_gather")
    for exchange in exchanges:
        name = f"dimension_wise_{exchange}"
        found += [Variant(name, True, True, exchange), Variant(f"{name}_no_unique", True, False, exchange)]
    found.append(Variant("dimension_wise_all_to_all_per_layer", True, True, "all_to_all", "per_layer"))
    return tuple(found)


VARIANTS = {variant.name: variant for variant in _variants()}


def chosen(names: str) -> tuple[Variant, ...]:
    """The variants of a comma-separated list, in the order in which they run; `all`: every one.

    Raises:
        UserError: a name that is none, or no name.
    """
    if names == "all":
        return tuple(VARIANTS.values())
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in VARIANTS]
    if unknown or not wanted:
        raise UserError(
            f"--variants: got {unknown[0] if unknown else 'no name'}, allowed all, or some of {', '.join(VARIANTS)}; "
            "separate them by commas"
        )
    return tuple(variant for name, variant in VARIANTS.items() if name in wanted)


def variant_config(base: RunConfig, variant: Variant, world_size: int) -> RunConfig:
    """`base` with the tables of `variant` over `world_size` data-parallel ranks."""
    parallel = replace(
        base.parallel,
        gate_group=variant.gate_group(world_size),
        gate_exchange=variant.exchange,
        gate_granularity=variant.granularity,
        unique_ids=variant.unique_ids,
    )
    return replace(base, parallel=parallel)
