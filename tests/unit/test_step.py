"""One optimizer step: mean over micro-batches, clipping, steps that are not finite, evaluation."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from egmla_megatron.attention.reference import ReferenceModel
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.convert.names import to_hf_tensors
from egmla_megatron.data.batch import Batch
from egmla_megatron.model.build import build_model
from egmla_megatron.model.names import global_names
from egmla_megatron.train.optimizer import build_optimizer, build_schedule, wrap_ddp
from egmla_megatron.train.step import evaluate, train_step
from egmla_megatron.train.step_times import StepTimes, step_times
from tests.tiny import TINY, random_batches, tiny_model, tiny_run


class Run(NamedTuple):
    """Everything a step needs."""

    cfg: RunConfig
    world: Any
    model: Any
    optimizer: Any
    named: dict[str, Any]

    def step(self, batches: Iterator[Batch], **optimizer: Any) -> Any:
        cfg = replace(self.cfg, optimizer=replace(self.cfg.optimizer, **optimizer))
        return train_step(cfg, self.world, self.model, self.optimizer, batches)

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.named.items()}


def open_run(world: Any, model: Any = TINY, **sections: Any) -> Run:
    """A run of two micro-batches a step, positioned at its first step."""
    cfg = tiny_run(model, **sections)
    world = replace(world, layout=replace(world.layout, num_microbatches=2))
    built = build_model(cfg, world)
    wrapped = wrap_ddp(cfg, built, world)
    optimizer = build_optimizer(cfg, wrapped, built)
    build_schedule(cfg, optimizer, 0)
    return Run(cfg, world, wrapped, optimizer, dict(global_names(built.module)))


def oracle_step(run: Run, batches: list[Batch]) -> tuple[float, float]:
    """(loss, gradient norm) of the reference: the mean over the unmasked tokens of all micro-batches."""
    weights = {name: parameter.detach().double() for name, parameter in run.named.items()}
    reference = ReferenceModel(run.cfg.model).double()
    reference.load_state_dict(dict(to_hf_tensors(weights, run.cfg.model)))
    total = torch.zeros((), dtype=torch.double)
    for batch in batches:
        flat = torch.nn.functional.cross_entropy(
            reference(batch.tokens_BS).flatten(0, 1), batch.labels_BS.flatten(), reduction="none"
        )
        mask = batch.loss_mask_BS.flatten()
        total = total + (flat * mask).sum()
    loss = total / sum(batch.loss_mask_BS.sum() for batch in batches)
    loss.backward()
    squares = [p.grad.square().sum().item() for p in reference.parameters() if p.grad is not None]
    return loss.item(), math.sqrt(sum(squares))


def masked(batch: Batch, keep: float) -> Batch:
    return replace(batch, loss_mask_BS=(torch.rand(batch.loss_mask_BS.shape) < keep).float())


@pytest.mark.parametrize("distributed", [False, True])
def test_loss_and_norm_equal_the_oracle(world: Any, distributed: bool) -> None:
    run = open_run(world, optimizer={"distributed": distributed}, data={"eod_mask_loss": True})
    stream = iter(random_batches(run.cfg))
    batches = [masked(next(stream), keep) for keep in (0.9, 0.2)]  # weighed by their tokens
    expected = oracle_step(run, batches)
    result = run.step(iter(batches))
    assert result.applied
    assert (result.loss, result.grad_norm) == pytest.approx(expected, rel=1e-6)


def test_clipping_scales_the_gradient_and_reports_the_norm_before(world: Any) -> None:
    """Adam does not see the scale of a gradient, so its first moment is looked at."""
    moments = {}
    for clip in (0.0, 0.01):
        run = open_run(world)
        norm = run.step(iter(random_batches(run.cfg)), clip_grad=clip).grad_norm
        states = [state for inner in inner_optimizers(run) for state in inner.state.values()]
        moments[clip] = math.sqrt(sum(state["exp_avg"].square().sum().item() for state in states))
    assert norm > 0.1
    beta1 = tiny_run().optimizer.beta1
    assert moments[0.0] == pytest.approx((1 - beta1) * norm, rel=1e-4)
    assert moments[0.01] == pytest.approx((1 - beta1) * 0.01, rel=1e-3)


def inner_optimizers(run: Run) -> list[Any]:
    """The torch optimizers inside megatron-core's: dense weights, and gating tables."""
    return [each.optimizer for each in getattr(run.optimizer, "chained_optimizers", [run.optimizer])]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("distributed", [False, True])
def test_a_step_that_is_not_finite_changes_nothing(world: Any, distributed: bool, value: float) -> None:
    run = open_run(world, optimizer={"distributed": distributed})
    twin = open_run(world, optimizer={"distributed": distributed})
    batches = list(zip(range(6), random_batches(run.cfg), strict=False))
    first, bad, last = ([batch for _, batch in batches[i : i + 2]] for i in (0, 2, 4))
    poisoned = [replace(batch, loss_mask_BS=batch.loss_mask_BS * value) for batch in bad]
    for each in (run, twin):
        assert each.step(iter(first)).applied
    before = run.weights()
    result = run.step(iter(poisoned))
    assert not result.applied and not math.isfinite(result.grad_norm)
    assert all(torch.equal(before[name], tensor) for name, tensor in run.weights().items())
    for each in (run, twin):  # moments and step count were left alone as well
        assert each.step(iter(last)).applied
    expected = twin.weights()
    assert all(torch.equal(expected[name], tensor) for name, tensor in run.weights().items())
    assert any(not torch.equal(before[name], tensor) for name, tensor in run.weights().items())


def test_evaluation_leaves_the_run_alone(world: Any) -> None:
    model = tiny_model(hidden_dropout=0.3, attention_dropout=0.3)
    run = open_run(world, model)
    stream = iter(random_batches(run.cfg))
    batches = [next(stream) for _ in range(3)]
    before, generator = run.weights(), torch.get_rng_state()
    loss = evaluate(run.cfg, run.world, run.model, iter(batches), 3)
    assert torch.equal(generator, torch.get_rng_state())
    assert run.model[0].training
    assert all(torch.equal(before[name], tensor) for name, tensor in run.weights().items())
    assert loss == pytest.approx(oracle_step(run, batches)[0], rel=1e-6)  # no dropout in the oracle


def test_a_few_steps_learn_one_batch_by_heart(world: Any) -> None:
    run = open_run(world, optimizer={"lr": 3e-2, "warmup_steps": 0})
    stream = iter(random_batches(run.cfg))
    batches = [next(stream), next(stream)]
    losses = [run.step(iter(batches)).loss for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("distributed", [False, True])
def test_measured_steps_are_the_same_steps(world: Any, distributed: bool) -> None:
    """Two micro-batches; the parts lie side by side inside the step, and what an evaluation does is in none of them."""
    run, twin = (open_run(world, optimizer={"distributed": distributed}) for _ in range(2))
    times = step_times(run.cfg, run.world, run.model)
    assert times is not None
    stream, plain = times.watch(random_batches(run.cfg)), random_batches(run.cfg)
    calls: list[str] = []
    for _ in range(2):
        started = time.perf_counter()
        result = train_step(
            run.cfg, run.world, run.model, run.optimizer, stream, None, times, lambda: calls.append("meanwhile")
        )
        whole = time.perf_counter() - started
        assert result == twin.step(plain)
        split = times.measured.split()
        assert split.exchange == 0.0 and split.gradient_sync is not None
        parts = [split.data, split.forward_backward, split.gradient_sync, split.optimizer]
        assert min(parts) > 0 and sum(parts) < whole
        assert split.data < split.busy <= split.data + split.forward_backward
        evaluate(run.cfg, run.world, run.model, random_batches(run.cfg), 1)
        assert times.measured.split() == split
    assert calls == ["meanwhile"] * 2


def test_inside_a_graph_nothing_is_measured(world: Any) -> None:
    times = StepTimes(cuda=False, captured=True, exchanges=True)
    run = open_run(world)
    times.attach(run.model)
    stream = times.watch(random_batches(run.cfg))
    train_step(run.cfg, run.world, run.model, run.optimizer, stream, None, times)
    split = times.measured.split()
    assert split.exchange is None and split.gradient_sync is None
    assert min(split.data, split.forward_backward, split.optimizer) > 0 and split.busy == split.data
