"""What every step cost and gave, agreed between the ranks, to the sinks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from egmla_megatron.attention.exchange_probe import Span
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.data.batch import Batch
from egmla_megatron.parallel.world import World
from egmla_megatron.train.metrics import SeenIds, Throughput, memory_of
from egmla_megatron.train.sinks import Sinks
from egmla_megatron.train.step import StepResult
from egmla_megatron.train.step_agreement import Agreed, Mean, StepAgreement, node_names
from egmla_megatron.train.step_times import Measured, Split, step_times

__all__ = ["Launched", "StepReporter"]


@dataclass(frozen=True)
class Launched:
    """What there is to know of a step when the host has launched it."""

    span: Span  # from its beginning to its end
    behind: Span | None  # of the step before, where this one was launched before that was done
    agreement: StepAgreement
    measured: Measured | None
    ids: tuple[int, int]  # distinct ids of this rank's micro-batches, tokens in them

    def seconds(self) -> float:
        """From its beginning, or from the end of the step before where it was launched ahead, to its end. By the
        device: when the host notices an end depends on what it launches meanwhile."""
        self.span.wait()
        return (self.span.ms() if self.behind is None else self.span.ms_behind(self.behind)) / 1e3


class StepReporter:
    """Around every step: `begin`, the launch with `times` and `meanwhile` in it, `launched`; and when the step is done
    `end`, before which the next one may have been launched. Called by every rank; rank 0 has sinks.

    Args:
        model: the DDP-wrapped chunks.
    """

    def __init__(self, cfg: RunConfig, world: World, model: list[Any], sinks: Sinks) -> None:
        self.cfg, self.world, self.sinks = cfg, world, sinks
        self._cuda = world.device.type == "cuda"
        self.throughput = Throughput.of(cfg, world.size, world.device)
        self.times = step_times(cfg, world, model)
        self.nodes = node_names(world.control)
        self.step_s = 0.0  # of the last step
        self._seen = SeenIds()
        self._busy = Mean()  # since the last line, for the slowest rank
        self._span = Span(self._cuda)
        self._open: Span | None = None  # of the step that was launched last, until it is done
        self._agreement: StepAgreement | None = None
        self._ids = (0, 0)  # as Launched.ids, since the last line
        self._unwritten: Callable[[], None] | None = None  # writes the last step, which was not due

    def watch(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same micro-batches, timed and counted."""
        seen = self._seen.watch(batches)
        return seen if self.times is None else self.times.watch(seen)

    def begin(self) -> None:
        """Before the step."""
        self._span = Span(self._cuda)

    def meanwhile(self, *, signal: int = 0, save_now: bool = False) -> None:
        """While the device works on the step: what this rank asks of the others sets out, slow sinks get their
        events."""
        self._agreement = StepAgreement(
            self.world.control,
            self.world.rank,
            signal=signal,
            save_now=save_now,
            memory=memory_of(self.world.device),
            busy_s=self._busy.value(),
        )
        self.sinks.flush()

    def launched(self) -> Launched:
        """After the launch: what `end` wants to have."""
        assert self._agreement is not None
        self._span.stop()
        measured = self.times.measured if self.times is not None else None
        behind, self._open = self._open, self._span
        return Launched(self._span, behind, self._agreement, measured, self._seen.take())

    def end(self, step: int, launched: Launched, result: StepResult, lr: float, *, profiled: bool = False) -> Agreed:
        """When step number `step` (from 1) is done; waits for the agreement, writes the step where it is due.

        Args:
            lr: that the step used.
            profiled: the step does not count in the throughput.
        """
        agreed = launched.agreement.result()
        self.step_s = launched.seconds()
        if self._open is launched.span:
            self._open = None
        split = launched.measured.split() if launched.measured is not None else None
        self._ids = (self._ids[0] + launched.ids[0], self._ids[1] + launched.ids[1])
        rates = self.throughput.add(self.step_s, profiled=profiled)
        self._unwritten = lambda: self.sinks.write("step", self._event(step, result, lr, agreed, split) | rates)
        if step % self.cfg.logging.interval_steps == 0 or not result.applied:
            self.finish()
            self._busy.clear()
            self._ids = (0, 0)
        if split is not None:
            self._busy.add(split.busy)
        return agreed

    def finish(self) -> None:
        """Write the last step of a start where that was not done: its loss and time are known otherwise to nobody."""
        if self._unwritten is not None:
            self._unwritten()
            self._unwritten = None

    def _event(self, step: int, result: StepResult, lr: float, agreed: Agreed, split: Split | None) -> dict[str, Any]:
        slowest = agreed.slowest_rank
        return {
            "step": step,
            "total_steps": self.cfg.total_steps,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "tokens": step * self.throughput.work.tokens,
            "skipped": not result.applied,
            "time_data_s": split and split.data,
            "time_forward_backward_s": split and split.forward_backward,
            "time_exchange_s": split and split.exchange,
            "time_gradient_sync_s": split and split.gradient_sync,
            "time_optimizer_s": split and split.optimizer,
            "peak_memory_mib": agreed.peak_memory_mib,
            "peak_memory_rank": agreed.peak_memory_rank,
            "reserved_memory_mib": agreed.reserved_memory_mib,
            "reserved_memory_rank": agreed.reserved_memory_rank,
            "slowest_rank": slowest,
            "slowest_node": None if slowest is None else self.nodes[slowest],
            "slowest_rank_busy_s": agreed.slowest_rank_busy_s,
            "fastest_rank_busy_s": agreed.fastest_rank_busy_s,
            "unique_id_fraction": self._ids[0] / self._ids[1] if self._ids[1] else None,
            "eta_s": (self.cfg.total_steps - step) * self.throughput.mean_step_s(),
        }
