"""Reads one item ahead in a thread: Arrow and zlib decode without the interpreter lock."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor

__all__ = ["prefetched"]


def prefetched[T](items: Iterator[T]) -> Generator[T]:
    """The same items in the same order; an exception of the iterator comes at its place.

    The iterator runs in one other thread, never while that thread's last item is not taken yet plus one ahead.
    """
    end = object()
    with ThreadPoolExecutor(1) as thread:
        pending = thread.submit(next, items, end)
        while True:
            item = pending.result()
            if item is end:
                return
            pending = thread.submit(next, items, end)
            yield item  # type: ignore[misc]
