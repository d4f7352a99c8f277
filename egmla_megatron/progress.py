"""A progress bar beside which processes may fork."""

from __future__ import annotations

from tqdm import tqdm

__all__ = ["Bar"]


class Bar(tqdm):
    """Without tqdm's thread, which redraws a bar whose steps slow down and stays when the bar is gone."""

    monitor_interval = 0
