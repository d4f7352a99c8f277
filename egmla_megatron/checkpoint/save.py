"""Writes checkpoints: temporary name, data, manifest, marker, rename. In the background on GPUs."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue

from egmla_megatron.checkpoint.failures import SAVE_ERRORS, raise_unless_disk
from egmla_megatron.checkpoint.manifest import (
    FORMAT,
    NONE,
    Manifest,
    checkpoint_path,
    complete_checkpoints,
    is_complete,
    mark_complete,
    mark_damaged,
)
from egmla_megatron.checkpoint.prune import prune
from egmla_megatron.checkpoint.size import checkpoint_bytes
from egmla_megatron.checkpoint.state import model_state, optimizer_state, rng_state
from egmla_megatron.config.load import architecture, to_dict
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.errors import UserError
from egmla_megatron.model.build import BuiltModel
from egmla_megatron.parallel.child_processes import deaf_children
from egmla_megatron.parallel.world import World
from egmla_megatron.train.deferred_rows import complete_rows

__all__ = ["Saver"]


class Saver:
    """Saves a run's checkpoints into RUN_DIR/checkpoints. Every method is called by every rank.

    Args:
        model: the DDP-wrapped chunks, whose parameters may still be waiting to be gathered.
        on_saved: called on rank 0 with (step, path, seconds) once a checkpoint is complete.
        unmarked: checkpoints of the run whose bytes changed, with the reason, but which could not be marked. They are
            marked, or written anew, before anything is pruned: they would be kept in place of whole ones.
    """

    def __init__(
        self,
        cfg: RunConfig,
        world: World,
        built: BuiltModel,
        model: list[Any],
        optimizer: Any,
        data_fingerprint: str,
        on_saved: Callable[[int, Path, float], None],
        unmarked: Mapping[Path, str] = NONE,
    ) -> None:
        self.cfg, self.world, self.built, self.model, self.optimizer = cfg, world, built, model, optimizer
        self.data_fingerprint, self.on_saved = data_fingerprint, on_saved
        self.unmarked = dict(unmarked)
        self.root = Path(cfg.run.dir) / "checkpoints"
        background = cfg.checkpoint.asynchronous and world.device.type == "cuda"
        self.queue = AsyncCallsQueue() if background else None

    def save(self, step: int, *, prune: bool = True) -> None:
        """Save the state after `step` steps; nothing to do when that checkpoint is complete already.

        Args:
            prune: once it is complete, delete older ones beyond checkpoint.keep.

        Raises:
            UserError: the disk is full or the write failed; earlier checkpoints are untouched.
        """
        self.finish()  # one write at a time, and it may be of this very step
        final = checkpoint_path(self.root, step)
        if self._agree(is_complete(final) and final not in self.unmarked):
            return
        started = time.time()
        temporary = final.with_name(final.name + ".incomplete")
        self._prepare(temporary)
        with deaf_children():
            get_write_results_queue()  # megatron-core keeps one for good, in a process of its own
        try:
            request = dist_checkpointing.save(
                self._state(),
                str(temporary),
                async_sharded_save=self.queue is not None,
                async_strategy="mcore",
            )
            done = self._finalizer(step, temporary, final, started, prune=prune)
            if self.queue is None or request is None:
                done()
            else:
                request.add_finalize_fn(done)
                self.queue.schedule_async_request(request)
        except SAVE_ERRORS as error:
            self._give_up(temporary, error)

    @property
    def writing(self) -> bool:
        """Whether a background write is not complete: `poll` then asks all ranks, behind what they launched."""
        return self.queue is not None and self.queue.get_num_unfinalized_calls() > 0

    def poll(self) -> None:
        """Complete a background write that has ended."""
        self._finalize_background(blocking=False)

    def finish(self) -> None:
        """Wait for the background write, if any."""
        self._finalize_background(blocking=True)

    def _finalize_background(self, *, blocking: bool) -> None:
        if self.queue is None or not self.writing:
            return
        try:
            self.queue.maybe_finalize_async_calls(blocking=blocking)
        except SAVE_ERRORS as error:
            self._give_up(None, error)

    def _state(self) -> dict[str, Any]:
        if self.cfg.parallel.overlap_param_gather:
            for chunk in self.model:
                chunk.start_param_sync(force_sync=True)  # the optimizer's step left that to the next forward
        complete_rows(self.optimizer)
        model = model_state(self.built, self.world)
        optimizer = optimizer_state(self.optimizer, model, self.world, loading=False)
        return {"model": model, "optimizer": optimizer, "rng": rng_state(self.world)}

    def _agree(self, mine: bool) -> bool:
        """What rank 0 says: shared disks may show a new folder to other ranks a moment later."""
        verdict: list[Any] = [mine]
        dist.broadcast_object_list(verdict, src=0, group=self.world.control)
        return bool(verdict[0])

    def _prepare(self, temporary: Path) -> None:
        """Make the temporary folder, after checking that the checkpoint will fit."""
        problem: list[Any] = [None]
        if self.world.is_first:
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir()
                problem[0] = self._too_full()
            except OSError as error:
                problem[0] = str(error)
        dist.broadcast_object_list(problem, src=0, group=self.world.control)
        if problem[0]:
            self._give_up(temporary, OSError(problem[0]))

    def _too_full(self) -> str | None:
        needed, free = checkpoint_bytes(self.cfg), shutil.disk_usage(self.root).free
        if free >= needed:
            return None
        return f"No space left on device: needs about {needed / 2**20:.0f} MiB, {free / 2**20:.0f} MiB are free"

    def _finalizer(self, step: int, temporary: Path, final: Path, started: float, *, prune: bool) -> Callable[[], None]:
        manifest = self._manifest(step)

        def done() -> None:
            failure: list[Any] = [None]
            if self.world.is_first:
                try:
                    mark_complete(temporary, final, manifest)
                except OSError as error:
                    failure[0] = str(error)
                else:
                    self.unmarked.pop(final, None)  # it is another one now
                    if prune:
                        self._prune()
                    self.on_saved(step, final, time.time() - started)
            dist.broadcast_object_list(failure, src=0, group=self.world.control)
            if failure[0]:
                raise OSError(failure[0])

        return done

    def _prune(self) -> None:
        """Old checkpoints that cannot be deleted cost space, not the run."""
        try:
            self._mark()
        except OSError as error:
            print(f"warning: nothing is deleted in {self.root}: {error}", file=sys.stderr, flush=True)
            return
        try:
            prune(self.root, self.cfg.checkpoint.keep, self.cfg.checkpoint.keep_every_steps)
        except OSError as error:
            print(f"warning: an old checkpoint in {self.root} cannot be deleted ({error})", file=sys.stderr, flush=True)

    def _mark(self) -> None:
        """The damaged ones that a start could not mark."""
        for path, why in list(self.unmarked.items()):
            mark_damaged(path, why)
            del self.unmarked[path]

    def _manifest(self, step: int) -> Manifest:
        import megatron.core

        samples = step * self.cfg.train.global_batch_size
        return Manifest(
            format=FORMAT,
            step=step,
            consumed_samples=samples,
            consumed_tokens=samples * self.cfg.train.seq_length,
            architecture=architecture(self.cfg.model),
            config=to_dict(self.cfg),
            layout=asdict(self.world.layout),
            data_fingerprint=self.data_fingerprint,
            distributed_optimizer=self.cfg.optimizer.distributed,
            implementation=self.built.implementation,
            versions={"torch": torch.__version__, "megatron-core": megatron.core.__version__},
            written_unix_s=time.time(),
        )

    def _give_up(self, temporary: Path | None, error: BaseException) -> None:
        raise_unless_disk(error)
        if self.world.is_first and temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        left = complete_checkpoints(self.root)
        kept = f"{left[-1].name} is intact" if left else "there was none before it"
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]  # above it stands a worker's traceback
        free = shutil.disk_usage(self.root if self.root.exists() else self.root.anchor or ".").free / 2**20
        raise UserError(
            f"checkpoint: writing to {self.root} failed ({reason[:300]}; {free:.0f} MiB are free); {kept}; "
            "free space or move run.dir, then start again to resume"
        ) from error
