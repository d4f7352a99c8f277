"""Converts parts in this process; token lists in parquet two at a time: Arrow decodes without the interpreter lock."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

from egmla_megatron.preprocess.encode import Encoder
from egmla_megatron.preprocess.part import Report, write_part
from egmla_megatron.preprocess.plan import Plan

__all__ = ["convert_here"]

_THREADS = 2  # more would wait for each other: what is not Arrow's runs one at a time


class _Stopped(Exception):
    """Raised in a thread whose part is not wanted any more."""


def convert_here(plan: Plan, numbers: Sequence[int], folder: Path, report: Report) -> None:
    """Converts the parts `numbers`. The first failure ends all threads and is raised."""
    threads = _threads(plan, len(numbers))
    lock, stopping, own = threading.Lock(), threading.Event(), threading.local()

    def report_one(number: int, done: int, tokens: int) -> None:
        if stopping.is_set():
            raise _Stopped
        with lock:
            report(number, done, tokens)

    def convert(number: int) -> None:
        write_part(plan, plan.parts[number], folder, own.encoder, partial(report_one, number), ahead=threads == 1)

    def begin() -> None:
        own.encoder = Encoder(plan.vocabulary, plan.append_eos)

    with ThreadPoolExecutor(threads, initializer=begin) as pool:
        futures = [pool.submit(convert, number) for number in numbers]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            stopping.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _threads(plan: Plan, parts: int) -> int:
    if any((source.format, source.kind) != ("parquet", "tokens") for source in plan.sources):
        return 1  # jsonl holds the interpreter lock nearly all of the time, and tokenizers are for one thread
    return max(1, min(_THREADS, len(os.sched_getaffinity(0)), parts))
