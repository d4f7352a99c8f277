"""One start of a run, from the process groups to the exit code."""

from __future__ import annotations

import os
import sys

import torch

from egmla_megatron.config.check import Layout
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.environment import whole_number
from egmla_megatron.errors import UserError
from egmla_megatron.parallel.child_processes import kill_children, stop_with_launcher
from egmla_megatron.parallel.liveness import PeerWatch
from egmla_megatron.parallel.world import close_world, open_world
from egmla_megatron.report.cpu_memory import resident_mib
from egmla_megatron.train.build_lock import clear_abandoned_build
from egmla_megatron.train.loop import Trainer
from egmla_megatron.train.setup import claim, prepare
from egmla_megatron.train.signals import StopRequest
from egmla_megatron.train.sinks import Sinks, open_sinks

__all__ = ["train"]

_STALL = 0.8  # of a collective's time limit, which ends the process on a GPU before it could say anything


def train(cfg: RunConfig, layout: Layout) -> int:
    """Train until done, stopped or failed; returns the exit code of this rank.

    Args:
        layout: what `preflight.check_everything` found.

    Raises:
        UserError: something the user can mend; nothing that was saved is lost.
    """
    stop_with_launcher()
    if whole_number("LOCAL_RANK", 0, 0) == 0:
        clear_abandoned_build(cfg)
    process_mib = resident_mib()
    world = open_world(cfg, layout)
    watch = PeerWatch(
        world.store, world.rank, world.size, cfg.train.peer_timeout_s, stall_s=_STALL * cfg.train.collective_timeout_s
    )
    sinks: Sinks | None = None
    try:
        claimed = claim(cfg, world)
        if claimed.complete:
            if world.is_first:
                print(claimed.complete, flush=True)
            code = 0
        else:
            run = prepare(cfg, world, claimed)
            stop = StopRequest()  # not before: until then nothing is to be saved, and a signal just ends the process
            sinks = open_sinks(cfg, is_first=world.is_first)
            code = Trainer(run, sinks, stop, watch, process_mib).run()
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"memory: rank {world.rank} ran out of GPU memory ({str(error).splitlines()[0][:160]}); lower "
            "train.micro_batch_size, set train.recompute=selective or full, or raise parallel.gate_group"
        ) from error
    except UserError as error:
        watch.leave_word(str(error))
        raise
    except RuntimeError as error:
        _explain_lost_peers(error, watch)
        raise
    finally:
        if sinks is not None:
            sinks.close()
    watch.close()
    close_world()
    return code


def _explain_lost_peers(error: RuntimeError, watch: PeerWatch) -> None:
    """A failed collective usually means that another rank died: name it. Ends this process if so.

    Only the lowest surviving rank speaks. os._exit, because tearing down groups with a dead member hangs.
    """
    dead = watch.dead_peers()
    if not dead:
        if "timed out" in str(error).lower() or "timeout" in str(error).lower():
            watch.name_who_is_behind()
        return
    if any(map(watch.left_word, dead)):  # it speaks for itself
        kill_children()
        os._exit(2)
    if min(set(range(watch.size)) - set(dead)) == watch.rank:
        names = ", ".join(watch.describe(rank) for rank in dead)
        reason = " ".join(str(error).split())[:200]
        print(
            f"error: {names} died at step {watch.step}; the other ranks end too, start again to resume from the newest "
            f"checkpoint, if there is one ({type(error).__name__}: {reason})",
            file=sys.stderr,
            flush=True,
        )
    kill_children()
    try:
        watch.end_with_others()
    finally:  # also where the store is gone by now
        os._exit(1)
