"""A rank that shows no sign of life is reported by name; one that ended in good order is not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed import HashStore

from egmla_megatron.parallel import liveness
from egmla_megatron.parallel.liveness import PeerWatch

LIMIT_S = 20.0


class Exited(BaseException):
    """What os._exit becomes here."""


class Store:
    """A HashStore, which lives in this process, with the methods of a TCPStore that PeerWatch calls."""

    def __init__(self) -> None:
        self.values: Any = HashStore()
        self.broken = threading.Event()

    def clone(self) -> Store:
        return self

    def __getattr__(self, name: str) -> Any:
        if self.broken.is_set():
            raise RuntimeError("connection reset")
        return getattr(self.values, name)


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Exit codes of processes that would have ended; a thread that would have ended its process ends alone."""
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise Exited

    monkeypatch.setattr(liveness.os, "_exit", leave)
    # this process lives on, and with it those that write the checkpoints of other tests
    monkeypatch.setattr(liveness, "kill_children", lambda: None)
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    yield codes


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def all_alive(store: Store, ranks: int) -> bool:
    return all(store.check([f"alive/{rank}"]) for rank in range(ranks))


def beats_of(store: Store) -> int:
    """Signs of life of rank 0 so far."""
    return int(store.get("alive/0").partition(b"|")[0])


def stop(watch: PeerWatch) -> None:
    """Silence a watch as a killed process is silent."""
    assert watch._thread is not None
    watch._end.set()
    watch._thread.join()


def test_a_silent_neighbour_is_named(exits: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    store = Store()
    watches = [PeerWatch(store, rank, 2, 1.0) for rank in range(2)]
    watches[0].step = 17
    wait_until(lambda: all_alive(store, 2))
    stop(watches[1])
    wait_until(lambda: exits)
    assert exits == [1]
    error = capsys.readouterr().err
    assert error.count("error: ") == 1
    assert "rank 1 (" in error and "pid" in error and "gave no sign of life" in error and "step 17" in error


def test_a_rank_that_never_came_is_reported_too(exits: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    PeerWatch(Store(), 2, 3, 0.5)
    wait_until(lambda: exits)
    assert "rank 0 gave no sign of life" in capsys.readouterr().err


def test_a_rank_that_is_done_may_be_silent(exits: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    store = Store()
    watches = [PeerWatch(store, rank, 3, 2.0) for rank in range(3)]
    wait_until(lambda: all_alive(store, 3))
    watches[1].close()
    beats = beats_of(store)
    wait_until(lambda: beats_of(store) > beats + 15)  # 15 x 0.2 s, well beyond the time-out
    assert watches[0].dead_peers() == watches[2].dead_peers() == []
    watches[0].close()
    watches[2].close()
    assert exits == [] and capsys.readouterr().err == ""


def test_dead_peers_are_those_that_stand_still(exits: list[int]) -> None:
    store = Store()
    watches = [PeerWatch(store, rank, 3, 10.0) for rank in range(3)]
    wait_until(lambda: all_alive(store, 3))
    stop(watches[1])
    assert watches[0].dead_peers() == [1] and not watches[0].left_word(1)
    watches[1].leave_word("data: got token id 64")
    assert watches[2].left_word(1)
    watches[2].end_with_others()
    stop(watches[2])
    assert watches[0].dead_peers() == [1]  # it is not rank 2 that the others end for
    watches[0].close()


def test_a_lost_store_means_that_its_host_is_gone(exits: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    store = Store()
    PeerWatch(store, 0, 2, 1.0)
    store.broken.set()
    wait_until(lambda: exits)
    assert "rendezvous store does not answer (RuntimeError: connection reset)" in capsys.readouterr().err


def test_a_rank_that_others_wait_for_is_named_though_it_lives(
    exits: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store()
    watches = [PeerWatch(store, rank, 2, 10.0, stall_s=1.5 if rank else 0.0) for rank in range(2)]
    for watch, doing in zip(watches, ("reading data", "computing"), strict=True):
        watch.step, watch.doing = 41, doing
    wait_until(lambda: b"|step 41, reading data" in store.get("alive/0"))
    said = []
    wait_until(lambda: said.append(capsys.readouterr().err) or said[-1])  # type: ignore[func-returns-value]
    assert said[-1].startswith("error: the other ranks wait for rank 0 (")
    assert said[-1].endswith(") at step 41, reading data; they are at step 41, computing\n")
    watches[0].doing = "computing"
    wait_until(lambda: not watches[1].behind())
    for watch in watches:
        watch.close()
    assert exits == [] and capsys.readouterr().err == ""


@pytest.mark.parametrize(("size", "timeout"), [(1, 5.0), (4, 0.0)])
def test_nothing_is_watched_alone_or_when_switched_off(size: int, timeout: float) -> None:
    watch = PeerWatch(None, 0, size, timeout)
    assert watch.dead_peers() == []
    watch.close()


def test_a_process_that_stood_still_itself_accuses_nobody(
    exits: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After SIGSTOP and SIGCONT, or a suspended machine, both sides' clocks jump at once."""
    store = Store()
    watches = [PeerWatch(store, rank, 2, 1.0) for rank in range(2)]
    wait_until(lambda: all_alive(store, 2))
    clock, jump = time.monotonic, 0.0
    monkeypatch.setattr(liveness.time, "monotonic", lambda: clock() + jump)
    beats = beats_of(store)
    store.set("alive/1", b"1")  # as the neighbour wrote it last
    jump = 100.0
    wait_until(lambda: beats_of(store) > beats + 3)
    assert exits == [] and capsys.readouterr().err == ""
    for watch in watches:
        watch.close()
