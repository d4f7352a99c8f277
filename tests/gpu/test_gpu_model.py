"""bf16 on a GPU: Transformer Engine and torch layers against the fp32 oracle, forward and backward.

bf16 keeps 8 bits: relative errors of one to two percent in the norm are its rounding, a wrong formula gives
more than ten.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from egmla_megatron.config.schema import ModelConfig, ParallelConfig, RunConfig, TrainConfig
from tests.gpu.small_model import SMALL
from tests.tiny import gate_variants

pytestmark = pytest.mark.gpu

BASE = replace(SMALL, num_layers=3, max_position_embeddings=128)
VARIANTS = {
    **gate_variants(BASE),
    "add_q_lora": replace(BASE, gate="add", q_lora_rank=96),
    "mla": replace(BASE, gate="none", kv_emb_dim=0),
}
IMPLEMENTATIONS = ("te", "torch")


@pytest.fixture(scope="module")
def world() -> Iterator[object]:
    from egmla_megatron.config.check import check_config
    from egmla_megatron.parallel.world import close_world, open_world, seed_everything

    cfg = _run(BASE, "torch")
    opened = open_world(cfg, check_config(cfg, 1))
    seed_everything(1, opened)
    yield opened
    close_world()


def _run(model: ModelConfig, implementation: str, kernels: str = "auto") -> RunConfig:
    train = TrainConfig(seq_length=128, micro_batch_size=2, global_batch_size=2, steps=1000)
    # no DDP here, so there are no main gradients
    parallel = ParallelConfig(implementation=implementation, kernels=kernels, fused_grad_accumulation=False)  # type: ignore[arg-type]
    return RunConfig(model=model, train=train, parallel=parallel)


def _relative(got: Tensor, expected: Tensor) -> float:
    difference = (got.float().cpu() - expected.float().cpu()).norm()
    return float(difference / expected.float().norm().clamp_min(1e-12))


def _oracle(built: object, model: ModelConfig, ids_BS: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the fp32 oracle with the model's own (bf16-rounded) weights."""
    from egmla_megatron.attention.reference import ReferenceModel
    from egmla_megatron.convert.names import to_hf_tensors
    from egmla_megatron.model.names import unsharded_weights

    reference = ReferenceModel(model)
    weights = {name: weight.float().cpu() for name, weight in unsharded_weights(built.module).items()}  # type: ignore[attr-defined]
    reference.load_state_dict(dict(to_hf_tensors(weights, model)))
    loss = reference.loss(ids_BS[:, :-1], ids_BS[:, 1:])
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("unique", "kernels"), [(True, "triton"), (True, "torch"), (False, "triton")])
def test_bf16_matches_the_fp32_oracle(
    world: object, implementation: str, variant: str, unique: bool, kernels: str
) -> None:
    """`unique`: a gate for each distinct id as in training, else one for each token."""
    if implementation == "te" and importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("transformer_engine is not installed")
    import os

    from egmla_megatron.attention.gate_ids import GatePlan
    from egmla_megatron.convert.names import to_hf_tensors
    from egmla_megatron.model.build import build_model
    from egmla_megatron.model.names import canonical_name, global_names

    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)  # megatron-core sets them per process and refuses a second, different model
    model = VARIANTS[variant]
    built = build_model(_run(model, implementation, kernels), world)  # type: ignore[arg-type]
    assert (built.implementation, built.kernels) == (implementation, kernels)
    ids_BS = torch.randint(model.vocab_size, (2, 129), generator=torch.Generator().manual_seed(0))
    expected_loss, expected_grads = _oracle(built, model, ids_BS)
    ids = ids_BS.cuda()
    positions = torch.arange(128, device="cuda")[None].expand(2, -1)
    plan = GatePlan(((0, 0),), 0, "all_to_all", unique, model.vocab_size)
    gate_ids = plan.plan({(0, 0): ids_BS[:, :-1]}).to(ids.device) if model.gated else None
    labels = ids[:, 1:].contiguous()
    loss = built.wrapped[0](ids[:, :-1], positions, None, labels=labels, gate_ids=gate_ids).float().mean()
    loss.backward()
    grads = {canonical_name(n): p.grad.float().cpu() for n, p in global_names(built.module)}
    got_grads = dict(to_hf_tensors(grads, model))
    assert got_grads.keys() == expected_grads.keys()
    errors = {name: _relative(got_grads[name], expected) for name, expected in expected_grads.items()}
    worst = max(errors, key=lambda name: errors[name])
    print(
        f"{variant} {implementation}: loss {loss.item():.5f} / {expected_loss:.5f}, worst {worst} {errors[worst]:.4f}"
    )
    assert abs(loss.item() - float(expected_loss)) < 0.01
    assert errors[worst] < 0.06, (worst, errors[worst])


@pytest.mark.parametrize("columns", [40, 256, 1537])
def test_sums_by_row(columns: int) -> None:
    """Against float64: frequent rows, rows of one token, rows of none; twice the same bits."""
    from egmla_megatron.attention.sum_by_row import pack_row_map, sum_by_row, unpack_row_map

    generator = torch.Generator().manual_seed(3)
    index_T = (torch.rand(1000, generator=generator) ** 3 * 200).long()
    rows = unpack_row_map(pack_row_map(index_T, 208).cuda(), 1000)
    x_TN = torch.randn(1000, columns, generator=generator)
    expected = torch.zeros(208, columns, dtype=torch.float64).index_add_(0, index_T, x_TN.double())
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 8e-3)):
        got = sum_by_row(x_TN.to("cuda", dtype), rows)
        error = (got.double().cpu() - expected).abs().max() / expected.abs().max()
        assert error < tolerance
        assert torch.equal(got, sum_by_row(x_TN.to("cuda", dtype), rows))
