"""What the end of a launch means: done, start again, or stop and say why."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from egmla_megatron.launching.ledger import Launch, RunTail
from egmla_megatron.parallel.child_processes import STOP_SIGNALS

__all__ = ["AGAIN", "Verdict", "close_launch", "judge"]

AGAIN = 75  # exit code: start the job again (EX_TEMPFAIL)
SAME_STEP = 3  # crashes in a row at one step: the next would be the same
NO_PROGRESS = 6  # ends of a job in a row without a newer checkpoint, wherever they happened, but for preemptions
# preemptions before a step (SIGTERM): the job's own fault they are not, but a start that is always preempted is in vain
PREEMPTED = 30
_KILLED = 128  # exit code of a process that signal n ended: 128 + n
_RESTARTING = tuple(number for number in STOP_SIGNALS if number != signal.SIGINT)


@dataclass(frozen=True)
class Verdict:
    """What the launch script does now."""

    code: int  # 0: done, AGAIN: start the job again, else stop with this
    sentence: str


def close_launch(launch: Launch, code: int, caught: int, tail: RunTail, said: str, *, checks: bool = False) -> Launch:
    """The launch with its end.

    Args:
        code: exit code of srun, the largest of its tasks'.
        caught: signal that the script itself got, 0: none.
        tail: metrics of the run.
        said: last error in the log.
        checks: it ended in the checks of the nodes, before training.
    """
    mine = tail.since(launch.started_unix_s)
    reached = max((record["step"] for record in (*mine.starts, *mine.steps)), default=launch.from_step)
    begun = mine.starts[0]["step"] if mine.starts else launch.from_step  # less, where the newest one was damaged
    stopped_by = next((int(end.get("signal") or 0) for end in reversed(mine.ends)), 0)
    closed = replace(
        launch,
        from_step=begun,
        ended_unix_s=time.time(),
        code=code,
        outcome=_outcome(code, caught, stopped_by, bool(mine.ends), checks),
        reached=reached,
        said=said,
        signal=caught or stopped_by or max(0, code - _KILLED),
    )
    # where a signal was the reason, errors are echoes of the end: connections that it cut
    return replace(closed, said="") if closed.outcome in ("saved", "stopped") and not _in_vain(closed) else closed


def _outcome(code: int, caught: int, stopped_by: int, ended: bool, checks: bool) -> str:
    """In one word: see `Launch.outcome`."""
    if stopped_by == signal.SIGINT or caught == signal.SIGINT:
        return "stopped"  # somebody asked for it
    if stopped_by:
        return "saved"
    if code == 0:
        return "done"
    if (caught and code > _KILLED) or (code - _KILLED in _RESTARTING and not ended):
        return "interrupted"  # before there was anything to save
    if code == 2 and not checks:
        return "mistake"
    return "crash"


def judge(launches: Sequence[Launch]) -> Verdict:
    """Decide by the last launch and those before it. The last one must have ended."""
    last = launches[-1]
    when = f"at step {last.reached}"
    if last.outcome == "done":
        return Verdict(0, f"ended in good order {when}")
    if last.outcome == "stopped":
        return Verdict(_KILLED + signal.SIGINT, f"stopped by SIGINT {when}; start it again to resume")
    if last.outcome == "mistake":
        return Verdict(2, f"not started again: {last.said or 'a mistake that a restart does not mend'}")
    if last.outcome == "saved" and not _in_vain(last):
        return Verdict(AGAIN, f"stopped by a signal {when} and saved")
    stuck = _stuck(launches)
    if stuck:
        return Verdict(last.code or 1, stuck)
    what = f"crashed (exit code {last.code})"
    if last.outcome in ("interrupted", "saved"):
        what = "interrupted before it could save"
    return Verdict(AGAIN, f"{what} {when}; it goes on from the newest complete checkpoint, if there is one")


def _stuck(launches: Sequence[Launch]) -> str:
    """Why a further start would be in vain; empty: it may help."""
    crashes = _of_this_job(_last_in_a_row(launches, lambda launch: launch.outcome in ("crash", "lost")))
    same = _same_end(crashes, lambda launch: launch.reached)
    if len(same) >= SAME_STEP:
        return f"{len(same)} crashes in a row at step {same[-1].reached}, not started again. " + _diagnosis(same)
    same = _same_end(_of_this_job(_last_in_a_row(launches, _in_vain)), lambda launch: launch.from_step)
    preempted = sum(map(_preempted, same))
    if len(same) - preempted >= NO_PROGRESS or preempted >= PREEMPTED:
        of_them = f" ({preempted} of them preempted, of which {PREEMPTED} are allowed)" if preempted else ""
        return (
            f"{len(same)} ends in a row without a checkpoint after step {same[-1].from_step}{of_them}, not started "
            "again; save more often (checkpoint.interval_minutes) or give the job more time, then submit it again. "
            + _diagnosis(same)
        )
    return ""


def _preempted(launch: Launch) -> bool:
    """Ended by somebody else's job: the time limit's signal is SIGUSR1."""
    return launch.outcome in ("interrupted", "saved") and launch.signal == signal.SIGTERM


def _in_vain(launch: Launch) -> bool:
    """Whether it may have brought nothing; a time limit below that of the signal stops every launch before a step."""
    before_a_step = launch.outcome == "saved" and launch.reached <= launch.from_step
    return before_a_step or launch.outcome in ("crash", "lost", "interrupted")


def _last_in_a_row(launches: Sequence[Launch], counts: Callable[[Launch], bool]) -> list[Launch]:
    found: list[Launch] = []
    for launch in reversed(launches):
        if not counts(launch):
            break
        found.insert(0, launch)
    return found


def _of_this_job(launches: Sequence[Launch]) -> list[Launch]:
    """A job that is submitted again has all of its tries."""
    return [launch for launch in launches if launch.job == launches[-1].job]


def _same_end(launches: Sequence[Launch], key: Callable[[Launch], int]) -> list[Launch]:
    found: list[Launch] = []
    for launch in reversed(launches):
        if key(launch) != key(launches[-1]):
            break
        found.insert(0, launch)
    return found


def _diagnosis(launches: Sequence[Launch]) -> str:
    """What the ends have in common."""
    always = set(launches[0].nodes).intersection(*(launch.nodes for launch in launches))
    ever = set().union(*(launch.nodes for launch in launches))
    words = Counter(launch.said for launch in launches if launch.said)
    said = f"Last words: {words.most_common(1)[0][0]}. " if words else "No error was written: look at the job's log. "
    if always and always != ever:
        return (
            said
            + f"Only {', '.join(sorted(always))} took part every time: try sbatch --exclude={','.join(sorted(always))}"
        )
    if not always:
        return said + "It happened on different nodes: suspect the data or numbers of that step, not the machines"
    return said + f"It was always on {', '.join(sorted(always))}: try other nodes to tell the machine from the data"
