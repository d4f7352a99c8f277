"""The Megatron model against the oracle: same weights -> same loss, logits and gradients, with every switch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from egmla_megatron.attention.gate_ids import GatePlan
from egmla_megatron.attention.reference import ReferenceModel
from egmla_megatron.config.schema import ModelConfig, RunConfig
from egmla_megatron.convert.names import to_hf_tensors
from egmla_megatron.model.build import build_model
from egmla_megatron.model.init import weight_std
from egmla_megatron.model.names import global_names
from egmla_megatron.parallel.world import seed_everything
from tests.tiny import GATES, MHA, PLAIN, TINY, gate_variants, tiny_model, tiny_run

# no size is even, no two are alike
ODD = replace(
    TINY,
    num_layers=3,
    hidden_size=21,
    num_attention_heads=3,
    intermediate_size=17,
    qk_nope_head_dim=5,
    qk_rope_head_dim=6,
    v_head_dim=7,
    kv_lora_rank=9,
    kv_emb_dim=11,
    vocab_size=31,
)
VARIANTS = {
    **gate_variants(TINY),
    "mla": tiny_model(**PLAIN),
    "mla_q_lora": tiny_model(**PLAIN, q_lora_rank=10),
    "q_lora_untied": tiny_model(q_lora_rank=10, tie_word_embeddings=False),
    "odd": ODD,
    "odd_q_lora_add": replace(ODD, q_lora_rank=13, gate="add", tie_word_embeddings=False),
    "odd_mla": replace(ODD, **PLAIN),
    "equal_heads": tiny_model(qk_nope_head_dim=6, qk_rope_head_dim=2, v_head_dim=8),  # SDPA's flash kernel
    "mha": tiny_model(**MHA),
    "mha_odd_untied": replace(ODD, **{**MHA, "v_head_dim": 7}, tie_word_embeddings=False),
    "theta_and_eps": tiny_model(rope_theta=100.0, rms_norm_eps=0.1, gate_norm_eps=0.3),
}
SHAPES = {"even": (2, 16), "odd": (3, 15), "one": (1, 7)}
ERROR = 1e-5


def build(world: Any, model: ModelConfig, **sections: Any) -> Any:
    """A built model whose norms and biases are random too: constants would hide a missing one."""
    built = build_model(tiny_run(model, **sections), world)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in built.module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return built


def oracle(built: Any, model: ModelConfig) -> ReferenceModel:
    """The reference in fp64 with the weights of `built`."""
    weights = {name: parameter.detach().double() for name, parameter in global_names(built.module)}
    reference = ReferenceModel(model).double()
    reference.load_state_dict(dict(to_hf_tensors(weights, model)))
    return reference


def draw_batch(model: ModelConfig, shape: tuple[int, int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """ids, labels, positions [B,S]."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(model.vocab_size, (2, *shape), generator=generator)
    return ids, labels, torch.arange(shape[1]).expand(shape)


def loss_of(built: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    ids, labels, positions = batch
    return built.wrapped[0](ids, positions, None, labels=labels).float().mean()


def gradients(built: Any) -> dict[str, Tensor]:
    """Gradients by megatron-core name."""
    return {name: parameter.grad for name, parameter in global_names(built.module)}


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], error: float) -> None:
    """Largest error of every tensor, relative to its largest element where that is above 1."""
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = max(1.0, tensor.abs().max().item())
        worst = (got[name].double() - tensor.double()).abs().max().item() / scale
        assert worst <= error, f"{name}: error {worst:.2e}"
        # softmax does not see a constant in all keys, so the key's bias has no gradient by its nature
        compared = tensor.abs().max().item() > 1e-7 or name.endswith("k_proj.bias")
        assert compared, f"{name}: no gradient, so nothing was compared"


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("model", VARIANTS.values(), ids=VARIANTS.keys())
def test_equals_the_oracle(world: Any, model: ModelConfig, shape: tuple[int, int]) -> None:
    built = build(world, model)
    reference = oracle(built, model)
    ids, labels, positions = draw_batch(model, shape)
    logits = built.wrapped[0](ids, positions, None)
    expected = reference(ids)
    assert (logits.double() - expected).abs().max().item() <= ERROR * max(1.0, expected.abs().max().item())
    loss = loss_of(built, (ids, labels, positions))
    assert loss.item() == pytest.approx(reference.loss(ids, labels).item(), abs=1e-6)
    loss.backward()
    reference.loss(ids, labels).backward()
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters() if parameter.grad is not None}
    assert_close(dict(to_hf_tensors(gradients(built), model)), wanted, ERROR)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is for CPUs; tests/gpu has the kernels")
@pytest.mark.parametrize(
    ("name", "recompute"),
    [("odd", "none"), ("mul", "selective"), ("add_without_norm", "none"), ("odd_q_lora_add", "none"), ("mla", "none")],
)
def test_the_kernels_equal_the_oracle(world: Any, monkeypatch: pytest.MonkeyPatch, name: str, recompute: str) -> None:
    monkeypatch.setattr("egmla_megatron.model.build.choose_kernels", lambda _: "triton")  # refused without a GPU
    model = VARIANTS[name]
    built = build(world, model, train={"recompute": recompute})
    ids, labels, positions = draw_batch(model, (2, 5))
    plan = GatePlan(((0, 0),), 0, "all_to_all", True, model.vocab_size)
    gate_ids = plan.plan({(0, 0): ids}) if model.gated else None
    loss = built.wrapped[0](ids, positions, None, labels=labels, gate_ids=gate_ids).mean()
    loss.backward()
    reference = oracle(built, model)
    expected = reference.loss(ids, labels)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters() if parameter.grad is not None}
    assert_close(dict(to_hf_tensors(gradients(built), model)), wanted, ERROR)


def in_flight(cfg: RunConfig, world: Any, model: ModelConfig, recompute: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and summed gradients of two micro-batches, the second forward before the first backward."""
    built = build(world, model, train={"recompute": recompute})
    seed_everything(cfg.run.seed, world)  # the same dropout each time
    first, second = (loss_of(built, draw_batch(model, (2, 8), seed)) for seed in (1, 2))
    first.backward()
    second.backward()
    return [first.item(), second.item()], gradients(built)


# Token data kept on a module instead of travelling in `context` passes with one micro-batch and is silently wrong here:
# when backward recomputes the first micro-batch, the module holds the second one's tokens.
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("name", [*GATES, "add_without_norm", "q_lora_untied", "mla", "mha"])
def test_recompute_with_two_micro_batches_in_flight(world: Any, name: str, recompute: str) -> None:
    model = replace(VARIANTS[name], hidden_dropout=0.2)
    losses, expected = in_flight(tiny_run(), world, model, "none")
    again, got = in_flight(tiny_run(), world, model, recompute)
    assert again == losses
    assert losses[0] != losses[1]
    assert_close(got, expected, 1e-6)


def test_recompute_really_recomputes(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the up-projections: once a forward, once more where recomputation covers them."""
    from egmla_megatron.attention.gated_kv_up import GatedKVUp

    calls: list[Any] = []
    original = GatedKVUp.forward

    def counted(self: GatedKVUp, latent: Tensor) -> Any:
        calls.append(self)
        return original(self, latent)

    monkeypatch.setattr(GatedKVUp, "forward", counted)
    counts = {}
    for recompute in ("none", "selective", "full"):
        calls.clear()
        in_flight(tiny_run(), world, TINY, recompute)
        counts[recompute] = len(calls)
    assert counts == {"none": 4, "selective": 8, "full": 8}


def test_tensor_parallel_dropout_has_a_generator_of_its_own(world: Any) -> None:
    """Dropout inside the tracker's fork must not move the generator of the dropout that TP ranks share."""

    def draws(*, forked: bool) -> tuple[Tensor, Tensor]:
        seed_everything(7, world)
        inside = torch.zeros(0)
        if forked:
            with get_cuda_rng_tracker().fork():
                inside = torch.rand(4, device=world.device)
        return torch.rand(4, device=world.device), inside

    outside, _ = draws(forked=False)
    again, inside = draws(forked=True)
    assert torch.equal(outside, again)
    assert not torch.equal(outside, inside)


def test_dropout_is_drawn_anew_and_off_in_evaluation(world: Any) -> None:
    model = tiny_model(hidden_dropout=0.2, attention_dropout=0.2)
    built, batch = build(world, model), draw_batch(model, (2, 8))
    assert loss_of(built, batch).item() != loss_of(built, batch).item()
    built.wrapped[0].eval()
    assert loss_of(built, batch).item() == pytest.approx(oracle(built, model).loss(*batch[:2]).item(), abs=1e-6)


def test_bf16_is_close_to_fp32(world: Any) -> None:
    built = build(world, TINY, train={"precision": "bf16"})
    assert {parameter.dtype for parameter in built.module.parameters()} == {torch.bfloat16}
    batch = draw_batch(TINY, (2, 16))
    loss = loss_of(built, batch)
    assert loss.item() == pytest.approx(oracle(built, TINY).loss(*batch[:2]).item(), rel=0.02)
    loss.backward()
    assert all(torch.isfinite(gradient).all() for gradient in gradients(built).values())


def test_layers_refuse_to_run_without_their_gate_embedding(world: Any) -> None:
    layer = build(world, TINY).module.decoder.layers[0]
    with pytest.raises(RuntimeError, match="context"):
        layer(torch.zeros(4, 1, TINY.hidden_size), attention_mask=None)
    with pytest.raises(RuntimeError, match="gate embedding"):
        layer.self_attention.linear_kv_up_proj(torch.zeros(4, 1, TINY.kv_lora_rank))


def test_initial_weights_have_the_stds_that_were_asked_for(world: Any) -> None:
    model = tiny_model(hidden_size=96, kv_emb_dim=64, kv_lora_rank=64, vocab_size=512, gate_table_init_std=0.5)
    built = build_model(tiny_run(model), world)
    for name, parameter in global_names(built.module):
        std = weight_std(name, model)
        if std is None:
            assert torch.equal(parameter, torch.full_like(parameter, float("bias" not in name))), name
        else:
            assert parameter.std().item() == pytest.approx(std, rel=0.1), name
    again = build_model(tiny_run(model), world)
    other = build_model(tiny_run(model, run={"seed": 8}), world)
    pairs = list(zip(built.module.parameters(), again.module.parameters(), other.module.parameters(), strict=True))
    assert all(torch.equal(first, second) for first, second, _ in pairs)
    assert any(not torch.equal(first, third) for first, _, third in pairs)


def test_weight_std_by_name() -> None:
    layer = "decoder.layers.0."
    up = f"{layer}self_attention.linear_kv_up_proj."
    model = tiny_model(gate_table_init_std=0.5)
    assert weight_std(f"{layer}input_layernorm.weight", model) is None
    assert weight_std(f"{up}gate_norm_weight", model) is None
    assert weight_std(f"{up}gate_norm_bias", model) is None
    assert weight_std(f"{layer}mlp.linear_fc1.layer_norm_weight", model) is None  # fused norm of Transformer Engine
    assert weight_std("gate_table.weight", model) == 0.5
    assert weight_std(f"{up}gate_proj_weight", model) == pytest.approx(1 / (0.5 * 6**0.5))
    add = replace(model, gate="add")
    assert weight_std(f"{up}gate_proj_weight", add) == pytest.approx(0.2 * 8**0.5 / (0.5 * 6**0.5))
    assert weight_std(f"{layer}mlp.linear_fc2.weight", model) == pytest.approx(0.2 / 2)
    assert weight_std(f"{layer}self_attention.linear_proj.weight", model) == pytest.approx(0.2 / 2)
    assert weight_std(f"{up}up.weight", model) == 0.2


def test_global_names_count_layers_in_the_model_and_fold_a_tied_head() -> None:
    class Layer(torch.nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.layer_number = number  # from 1, as megatron-core counts
            self.weight = torch.nn.Parameter(torch.zeros(1))

    stage: Any = torch.nn.Module()
    stage.decoder = torch.nn.Module()
    stage.decoder.layers = torch.nn.ModuleList([Layer(3), Layer(4)])
    stage.output_layer = torch.nn.Linear(1, 1, bias=False)
    names = [name for name, _ in global_names(stage)]
    assert names == ["decoder.layers.2.weight", "decoder.layers.3.weight", "output_layer.weight"]
    stage.output_layer.weight.shared_embedding = True
    assert [name for name, _ in global_names(stage)][-1] == "embedding.word_embeddings.weight"
