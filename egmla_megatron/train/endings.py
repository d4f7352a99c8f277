"""How a start of a run ends, in words for the one who started it."""

from __future__ import annotations

from egmla_megatron.checkpoint.choose import where_it_resumes
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.train.step import StepResult

__all__ = ["not_saved", "too_many_bad_steps"]


def not_saved(start: int, saved: int, step: int, total: int) -> str:
    """What the next start repeats, to follow the reason of an end; empty: nothing.

    Args:
        start: steps done when this start began.
        saved: those of the newest checkpoint.
        step: those that are done now.
    """
    if saved >= step:
        return ""
    steps = f"step {step}" if step == saved + 1 else f"steps {saved + 1} to {step}"
    hint = f"; {steps} not saved (checkpoint.at_end=false), the next start repeats them"
    if step == total or saved > start:
        return hint
    return (
        f"{hint}, as would every other: set checkpoint.at_end=true, or checkpoint.interval_steps to 1..{step - start}"
    )


def too_many_bad_steps(cfg: RunConfig, count: int, step: int, last: StepResult) -> str:
    """Why a run whose steps are not finite any more is ended, and what to do.

    Args:
        count: of them in a row; `step` is the number of the last.
    """
    steps, allowed = (f"{count} steps in a row", f"up to {count - 1}") if count > 1 else ("1 step", "none")
    return (
        f"training: {steps} gave no finite gradient (last: step {step}, loss {last.loss}, grad_norm {last.grad_norm}), "
        f"allowed {allowed} (train.max_bad_steps={cfg.train.max_bad_steps}); the weights were left alone. Lower "
        f"optimizer.lr or check the data, then start again: {where_it_resumes(cfg)}"
    )
