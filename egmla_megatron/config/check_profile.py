"""Whether the profiled window lies in the run."""

from __future__ import annotations

from egmla_megatron.config.schema import RunConfig
from egmla_megatron.config.workable import refuse

__all__ = ["check_profile"]

_MOST_STEPS = 50  # traces of more are too large for the viewers


def check_profile(cfg: RunConfig, world_size: int) -> None:
    """Raises UserError for steps or ranks that cannot be profiled."""
    steps, ranks = cfg.profile.steps, cfg.profile.ranks
    got = _text(steps)
    if steps and len(steps) != 2:
        refuse(
            "profile.steps is the first and the last step to record",
            got,
            "[FIRST, LAST], or [] for no profile",
            "set profile.steps=[10,12]",
        )
    if steps and not 1 <= steps[0] <= steps[1] <= cfg.total_steps:
        refuse(
            "profile.steps lies outside the run, or ends before it begins",
            got,
            f"1 <= FIRST <= LAST <= {cfg.total_steps}, the steps of the run",
            f"set profile.steps=[{min(10, cfg.total_steps)},{min(12, cfg.total_steps)}]",
        )
    if steps and steps[1] - steps[0] >= _MOST_STEPS:
        refuse(
            "profile.steps is too long a window for one trace",
            f"{got}, {steps[1] - steps[0] + 1} steps",
            f"up to {_MOST_STEPS} steps",
            f"set profile.steps=[{steps[0]},{steps[0] + 2}]",
        )
    if not ranks or len(set(ranks)) < len(ranks) or not all(0 <= rank < world_size for rank in ranks):
        refuse(
            "profile.ranks are the ranks that record",
            _text(ranks),
            f"one or more different ones of 0 to {world_size - 1}",
            "set profile.ranks=[0]",
        )


def _text(numbers: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, numbers))}]"
