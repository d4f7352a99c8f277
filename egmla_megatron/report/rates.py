"""Speed of steps: the one place of its formulas."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from egmla_megatron.config.schema import RunConfig
from egmla_megatron.model.count import flops_per_token

__all__ = ["Rates", "Workload"]


@dataclass(frozen=True)
class Rates:
    """Under the names of train/events.py."""

    tokens_per_second: float
    tokens_per_second_per_rank: float
    tflops_per_second_per_rank: float
    mfu: float | None  # None: the card's peak is not known

    def named(self) -> dict[str, float | None]:
        """name -> value."""
        return asdict(self)


@dataclass(frozen=True)
class Workload:
    """What a step computes."""

    tokens: int
    flops_per_token: float  # forward and backward, gate counted, nothing twice for recomputation

    @classmethod
    def of(cls, cfg: RunConfig) -> Workload:
        """A step of a configuration, over all ranks."""
        return cls(
            cfg.train.global_batch_size * cfg.train.seq_length,
            flops_per_token(cfg.model, cfg.train.seq_length).forward_backward,
        )

    def rates(self, seconds: float, ranks: int, peak_flops: float | None) -> Rates:
        """At `seconds` a step.

        Args:
            peak_flops: dense bf16 peak of one rank's card, FLOP/s; None: not known.
        """
        rate = self.tokens / seconds
        flops = rate / ranks * self.flops_per_token
        return Rates(rate, rate / ranks, flops / 1e12, flops / peak_flops if peak_flops else None)
