"""The training loop: steps, evaluation, checkpoints, stop requests."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from egmla_megatron.checkpoint.save import Saver
from egmla_megatron.data.batch import Batch
from egmla_megatron.data.blend import tokenizer_sha256
from egmla_megatron.errors import UserError
from egmla_megatron.model.count import count_parameters
from egmla_megatron.parallel.liveness import COMPUTING, PeerWatch
from egmla_megatron.train.endings import not_saved, too_many_bad_steps
from egmla_megatron.train.expected import passed_over, predicted_memory_mib
from egmla_megatron.train.metrics import Phases, memory_of
from egmla_megatron.train.profiler import StepProfiler
from egmla_megatron.train.reporter import Launched, StepReporter
from egmla_megatron.train.setup import Prepared, device_name, training_batches, validation_batches
from egmla_megatron.train.signals import StopRequest
from egmla_megatron.train.sinks import Sinks
from egmla_megatron.train.step import StepInFlight, StepResult, evaluate, graphed_passes, launch_step
from egmla_megatron.train.step_agreement import Agreed

__all__ = ["Trainer"]


@dataclass(frozen=True)
class _Flight:
    """A launched step that was not looked at yet."""

    step: int  # its number, from 1
    work: StepInFlight
    launched: Launched
    lr: float  # that it uses
    profiled: bool


class Trainer:
    """Runs a prepared run to its end, to a stop request, or to an error the user must see.

    Args:
        process_mib: resident memory of the process before the model was built, for the prediction on CPUs.
    """

    def __init__(
        self, run: Prepared, sinks: Sinks, stop: StopRequest, watch: PeerWatch, process_mib: float | None
    ) -> None:
        self.process_mib = process_mib
        self.run_, self.cfg, self.world = run, run.cfg, run.world
        self.sinks, self.stop, self.watch = sinks, stop, watch
        self.step = run.start_step  # optimizer steps done
        self.flights: deque[_Flight] = deque()  # launched since
        self.agreed: Agreed | None = None  # in the last step that is done
        self.bad_steps = 0  # steps without an update in a row
        self.skipped_total = 0
        self.has_states = run.optimizer_has_states
        self.phases = Phases()
        self.reporter = StepReporter(self.cfg, self.world, run.model, sinks)
        self.profiler = StepProfiler(self.cfg, self.world.rank, self.world.device, self.step, self._on_profiled)
        self.graph = graphed_passes(self.cfg, self.world, run.model)
        self.saved_at = time.monotonic()
        self.saved_step = self.step  # that the next start would go on from
        self.save_is_due = False  # put off until a step is good
        self.evaluated_at = -1
        fingerprint = run.datasets.fingerprint
        self.saver = Saver(
            self.cfg, self.world, run.built, run.model, run.optimizer, fingerprint, self._on_saved, run.unmarked
        )

    def run(self) -> int:
        """Train. Returns the exit code: 0, or 128 + the signal that stopped it."""
        self._log_start()
        batches = self.reporter.watch(self._noted(training_batches(self.run_)))
        last = self.cfg.total_steps
        if self.cfg.train.exit_after_steps:
            last = min(last, self.step + self.cfg.train.exit_after_steps)
        signal = 0
        while self.step + len(self.flights) < last:
            self._launch(batches)
            self._settle(self._steps_to_leave(last))
            signal, save_now = self._asked()
            if signal or save_now:
                self._settle(0)
            if signal:
                break
            if not self.flights:  # the weights are those of `step`
                self._between_steps(save_now=save_now, ends=self.step == last)
            with self.phases.of("checkpoint"):
                self.saver.poll()
        code = self._finish(signal)
        if self.graph is not None:
            self.graph.release()
        return code

    def _between_steps(self, *, save_now: bool, ends: bool) -> None:
        """Save and evaluate where it is time, in this order: an evaluation can outlast what a preempted job is given.

        No save by interval while steps are bad: it would push out checkpoints from before the trouble. The first good
        step makes up for it. All ranks have the same results, so they agree.
        """
        if ends:
            self.reporter.finish()
        self.save_is_due = self.save_is_due or save_now or self._interval(self.cfg.checkpoint.interval_steps)
        if (self.save_is_due and not self.bad_steps) or (ends and self.cfg.checkpoint.at_end):
            self._save()
        self._evaluate_if_due(final=self.step >= self.cfg.total_steps)

    def _noted(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The batches, telling the others when this rank waits for its data."""
        while True:
            self.watch.doing = "reading data"
            batch = next(batches)
            self.watch.doing = COMPUTING
            yield batch

    def _launch(self, batches: Iterator[Batch]) -> None:
        """Launch the next step; where the device decides it, others may still be in flight."""
        step, run = self.step + len(self.flights) + 1, self.run_
        self.stop.catch()
        with self.phases.of("profile"):
            self.profiler.begin(step)
        self.reporter.begin()
        work = launch_step(
            self.cfg,
            self.world,
            run.model,
            run.optimizer,
            batches,
            self.graph,
            self.reporter.times,
            lambda: self.reporter.meanwhile(signal=self.stop.received, save_now=self._minutes_are_up()),
        )
        flight = _Flight(step, work, self.reporter.launched(), self._learning_rate(), self.profiler.covers(step))
        self.flights.append(flight)
        run.schedule.step(1)

    def _steps_to_leave(self, last: int) -> int:
        """Steps that need not be done before the next is launched: one, unless something happens between them. While a
        checkpoint is written the saver's question would wait for it, and count as held up by the checkpoint."""
        flight = self.flights[-1]
        step = flight.step
        evaluations = self.cfg.train.eval_interval if self.run_.datasets.valid is not None else 0
        intervals = (self.cfg.checkpoint.interval_steps, evaluations)
        due = self.saver.writing or self.save_is_due or step == last
        due = due or any(interval > 0 and step % interval == 0 for interval in intervals)
        return 0 if flight.work.finished or due or self.profiler.covers(step) or self.profiler.covers(step + 1) else 1

    def _settle(self, leave: int) -> None:
        """Wait for all launched steps but the last `leave`, and report them."""
        while len(self.flights) > leave:
            flight = self.flights.popleft()
            result = flight.work.result()
            self.watch.step = self.step = flight.step
            self.agreed = self.reporter.end(flight.step, flight.launched, result, flight.lr, profiled=flight.profiled)
            self._count_time(flight.profiled)
            with self.phases.of("profile"):
                self.profiler.end(flight.step)
            self._count_bad_steps(result)

    def _asked(self) -> tuple[int, bool]:
        """(stop signal, save now), as all ranks agreed in the newest step, which may still be under way: agreeing waits
        for no device."""
        agreed = self.flights[-1].launched.agreement.result() if self.flights else self.agreed
        assert agreed is not None
        return agreed.signal, agreed.save_now

    def _count_time(self, profiled: bool) -> None:
        throughput = self.reporter.throughput
        phase = "profile" if profiled else "warmup" if throughput.steps <= throughput.warmup else "training"
        self.phases.seconds[phase] += self.reporter.step_s

    def _learning_rate(self) -> float:
        groups = self.run_.optimizer.param_groups
        return float(next((g["lr"] for g in groups if g.get("default_config")), groups[0]["lr"]))

    def _count_bad_steps(self, result: StepResult) -> None:
        self.bad_steps = 0 if result.applied else self.bad_steps + 1
        self.skipped_total += not result.applied
        self.has_states = self.has_states or result.applied
        if self.bad_steps >= self.cfg.train.max_bad_steps:
            self.saver.finish()
            raise UserError(too_many_bad_steps(self.cfg, self.bad_steps, self.step, result))

    def _interval(self, steps: int) -> bool:
        return steps > 0 and self.step % steps == 0

    def _minutes_are_up(self) -> bool:
        minutes = self.cfg.checkpoint.interval_minutes
        return self.world.is_first and 0 < minutes <= (time.monotonic() - self.saved_at) / 60

    def _save(self) -> bool:
        """Whether there was something to save: before the first update the optimizer has no states, and a new start
        is at the same point."""
        self.saved_at = time.monotonic()
        self.save_is_due = False
        if not self.has_states:
            return False
        self.watch.doing = "saving"
        with self.phases.of("checkpoint"):
            self.saver.save(self.step, prune=not self.bad_steps)
        self.saved_at, self.saved_step = time.monotonic(), self.step
        return True

    def _on_saved(self, step: int, path: Path, seconds: float) -> None:
        self.sinks.write("checkpoint", {"step": step, "path": str(path), "seconds": seconds})

    def _on_profiled(self, path: Path) -> None:
        self.sinks.write("profile", {"step": self.step, "path": str(path)})

    def _evaluate_if_due(self, *, final: bool = False) -> None:
        due = self._interval(self.cfg.train.eval_interval) or final
        if self.run_.datasets.valid is None or not due or self.evaluated_at == self.step:
            return
        started = time.perf_counter()
        self.watch.doing = "validating"
        with self.phases.of("evaluation"):
            batches, count = validation_batches(self.run_)
            loss = evaluate(self.cfg, self.world, self.run_.model, batches, count)
        self.evaluated_at = self.step
        tokens = count * self.cfg.train.micro_batch_size * self.world.layout.dp * self.cfg.train.seq_length
        perplexity = math.exp(loss) if loss < 700 else math.inf
        seconds = time.perf_counter() - started
        event = {"step": self.step, "val_loss": loss, "val_ppl": perplexity, "tokens": tokens, "seconds": seconds}
        self.sinks.write("eval", event)

    def _finish(self, signal: int) -> int:
        self.reporter.finish()
        saved = bool(signal or self.cfg.checkpoint.at_end) and self._save()
        if signal:
            what = "saved" if saved else "with nothing to save before the first update"
            reason = f"stopped by signal {signal}, {what}; start again to resume"
        else:
            reason = "done" if self.step >= self.cfg.total_steps else "train.exit_after_steps reached"
            if self.has_states:
                reason += not_saved(self.run_.start_step, self.saved_step, self.step, self.cfg.total_steps)
        if not signal:  # after a signal seconds count: save, nothing else
            self._evaluate_if_due(final=self.step >= self.cfg.total_steps)
        with self.phases.of("checkpoint"):
            self.saver.finish()
        with self.phases.of("profile"):
            self.profiler.close()
        event = {"step": self.step, "reason": reason, "signal": signal, "skipped_steps": self.skipped_total}
        rates = self.reporter.throughput.mean_rates()
        self.sinks.write("end", event | rates | self.phases.totals() | self._memory_by_rank())
        return 128 + signal if signal else 0

    def _memory_by_rank(self) -> dict[str, Any]:
        mine = memory_of(self.world.device)
        everyone: list[Any] = [None] * self.world.size
        dist.all_gather_object(everyone, mine, group=self.world.control)
        known = mine.reserved_mib is not None
        return {
            "peak_memory_mib_by_rank": [round(each.peak_mib) for each in everyone],
            "reserved_memory_mib_by_rank": [round(each.reserved_mib) for each in everyone] if known else None,
        }

    def _log_start(self) -> None:
        counts = count_parameters(self.cfg.model)
        self.sinks.write(
            "start",
            {
                "step": self.step,
                "total_steps": self.cfg.total_steps,
                "resumed_from": self.run_.resumed_from,
                "passed_over": passed_over(self.run_),
                "world_size": self.world.size,
                "device": device_name(self.world.device),
                "implementation": self.run_.built.implementation,
                "attention_backend": self.run_.built.attention_backend,
                "kernels": self.run_.built.kernels,
                "cuda_graph": self.graph is not None,
                "precision": self.cfg.train.precision,
                "layout": asdict(self.world.layout),
                "active_params": counts.active,
                "gate_table_params": counts.gate_tables,
                "tokenizer_sha256": tokenizer_sha256(self.cfg),
                "predicted_memory_mib": predicted_memory_mib(self.run_, self.process_mib),
            },
        )
