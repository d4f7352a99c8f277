"""Notices a dead rank and names it, instead of a hang or a bare connection error."""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
import time
from collections import Counter
from datetime import timedelta
from typing import Any

from egmla_megatron.parallel.child_processes import kill_children

__all__ = ["COMPUTING", "PeerWatch"]

DONE = b"done"
COMPUTING = "computing"


class PeerWatch:
    """Signs of life of every rank in the rendezvous store.

    A background thread writes this rank's counter every `interval` seconds and watches the next rank's
    (so every rank is watched by one other, whatever their number). A rank whose counter stands still for
    `timeout` seconds is reported by name and this process ends with exit code 1; the launcher ends the rest.

    Every sign of life also says what its rank is doing: where all are alive and a collective still does not end, the
    rank that does something else than most is the one to look at.

    Args:
        store: a torch.distributed store that outlives any rank's death (torchrun's agent hosts it).
        timeout: seconds; 0: do not watch.
        stall_s: seconds without progress after which the ranks that are behind are named; 0: never.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float, stall_s: float = 0.0) -> None:
        self.rank, self.size, self.timeout, self.stall_s = rank, size, timeout, stall_s
        self.interval = min(2.0, max(0.2, timeout / 10))
        self.step = 0  # for the message
        self.doing = "starting"  # what the main thread is at
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        if size > 1 and timeout > 0:
            self.store = store.clone()  # own connection: the main thread may block in a collective's set-up
            self.store.set_timeout(timedelta(seconds=max(5.0, timeout / 2)))
            self.store.set(f"who/{rank}", f"{socket.gethostname()}, pid {os.getpid()}")
            self._thread = threading.Thread(target=self._watch, name="peer-watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Say that this rank ended in good order, and stop watching."""
        if self._thread is None:
            return
        self._end.set()
        self._thread.join()
        self.store.set(f"alive/{self.rank}", DONE)

    def leave_word(self, message: str) -> None:
        """This rank is about to end with an error that names its own cause: the others need not guess."""
        if self._thread is not None:
            self.store.set(f"word/{self.rank}", message)

    def end_with_others(self) -> None:
        """This rank is about to end because another one died: nobody is to take it for the one that did."""
        if self._thread is not None:
            self.store.set(f"follows/{self.rank}", "")

    def left_word(self, rank: int) -> bool:
        """Whether a rank ended with an error that it reports itself."""
        return bool(self.store.check([f"word/{rank}"]))

    def describe(self, rank: int) -> str:
        """`rank 3 (host, pid 17)`."""
        key = f"who/{rank}"
        return f"rank {rank} ({self.store.get(key).decode()})" if self.store.check([key]) else f"rank {rank}"

    def dead_peers(self) -> list[int]:
        """Ranks whose counter does not move within a few intervals, but for those that end because of others; for the
        message after a failed collective."""
        if self._thread is None:
            return []
        others = [rank for rank in range(self.size) if rank != self.rank]
        first = {rank: self._read(rank) for rank in others}
        time.sleep(3 * self.interval)
        silent = [rank for rank in others if first[rank] != DONE and self._read(rank) == first[rank]]
        return [rank for rank in silent if not self.store.check([f"follows/{rank}"])]

    def behind(self) -> dict[int, str]:
        """Rank -> what it does, of the ranks that do something else than most; empty when all do the same."""
        if self._thread is None:
            return {}
        said = {rank: self._read(rank) for rank in range(self.size)}
        doing = {rank: value.partition(b"|")[2].decode() for rank, value in said.items() if value != DONE}
        counts = Counter(doing.values())
        usual = max(counts, key=lambda what: (counts[what], COMPUTING in what))  # whoever computes is who waits
        return {rank: what for rank, what in doing.items() if what != usual}

    def name_who_is_behind(self) -> None:
        """One line on stderr, from the lowest rank that is not behind."""
        behind = self.behind()
        if not behind or min(set(range(self.size)) - behind.keys()) != self.rank:
            return
        named = ", ".join(f"{self.describe(rank)} at {what or 'nothing yet'}" for rank, what in behind.items())
        print(f"error: the other ranks wait for {named}; they are at {self._where()}", file=sys.stderr, flush=True)

    def _where(self) -> str:
        return f"step {self.step}, {self.doing}"

    def _read(self, rank: int) -> bytes:
        key = f"alive/{rank}"
        return bytes(self.store.get(key)) if self.store.check([key]) else b""

    def _watch(self) -> None:
        neighbour = (self.rank + 1) % self.size
        seen, seen_at, beat, turn = b"", time.monotonic(), 0, time.monotonic()
        where, since = "", turn
        while not self._end.wait(self.interval):
            beat += 1
            before, turn = turn, time.monotonic()
            if turn - before > 3 * self.interval + 1:  # this process stood still, so it saw nothing either
                seen_at = turn
            if self._where() != where:
                where, since = self._where(), turn
            try:
                self.store.set(f"alive/{self.rank}", f"{beat}|{where}")
                value = self._read(neighbour)
                if 0 < self.stall_s < turn - since:
                    self.name_who_is_behind()
                    since = math.inf  # once for each place
            except Exception as error:  # any failure of the store has one meaning: its host is gone
                self._give_up(f"the rendezvous store does not answer ({type(error).__name__}: {error})")
            if value != seen:
                seen, seen_at = value, turn
            elif value != DONE and turn - seen_at > self.timeout:
                self._give_up(f"{self.describe(neighbour)} gave no sign of life for {self.timeout:.0f} s")

    def _give_up(self, reason: str) -> None:
        if self._end.is_set():
            return
        print(f"error: {reason}; rank {self.rank} ends at step {self.step}", file=sys.stderr, flush=True)
        kill_children()
        os._exit(1)
