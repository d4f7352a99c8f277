"""Time that a run lost in restarts."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["LostTime"]


class LostTime:
    """Reads the lines of a run in their order.

    From the last line before a stop to the first new progress behind it a run stands still, starts, and repeats steps.
    Lines of repeated steps, evaluations and checkpoints are counted as such elsewhere; the ones that they replace are
    not, and so belong here.
    """

    def __init__(self) -> None:
        self._lost = 0.0
        self._since: float | None = None  # last sign of life before a stop that is not made up for yet
        self._elsewhere = 0.0  # seconds since then that other rows count
        self._now: float | None = None
        self._step = self._highest = 0
        self._work: dict[tuple[str, int], float] = {}  # what a restart could throw away

    def read(self, record: dict[str, Any]) -> None:
        """The next line."""
        before, now = self._now, record.get("unix_time_s")
        if not isinstance(now, int | float):
            return  # not of this program's logs
        self._now = float(now)
        kind = record["kind"]
        if kind == "start":
            self._start(int(record.get("step") or 0), before)
        elif kind == "step":
            self._progress(record)
        elif kind in ("eval", "checkpoint"):
            self._elsewhere += _seconds(record, "seconds")
            if kind == "eval":
                self._work[kind, record["step"]] = _seconds(record, "seconds")

    def _start(self, done: int, before: float | None) -> None:
        if before is not None and self._since is None:
            self._since, self._elsewhere = before, 0.0
        for work in [work for work in self._work if work[1] > done]:
            self._lost += self._work.pop(work)
        self._step = done

    def _progress(self, record: dict[str, Any]) -> None:
        step = int(record["step"])
        seconds = max(0, step - self._step) * _seconds(record, "step_time_s")
        self._step, self._work["step", step] = step, seconds
        self._elsewhere += seconds
        if step > self._highest:
            self._close()
            self._highest = step

    def _close(self) -> None:
        if self._since is not None and self._now is not None:
            self._lost += max(0.0, self._now - self._since - self._elsewhere)
        self._since = None

    def total(self) -> float:
        """Seconds, behind the last line."""
        self._close()
        return self._lost


def _seconds(record: dict[str, Any], key: str) -> float:
    value = record.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
