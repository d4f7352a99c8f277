"""The Hugging Face model equals the oracle, caches latents only, and generates with the cache as without it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from egmla_megatron.config.schema import ModelConfig
from egmla_megatron.convert.hf.configuration_egmla import EgmlaConfig
from egmla_megatron.convert.hf.modeling_egmla import CACHE, EgmlaCache, EgmlaForCausalLM
from egmla_megatron.convert.hf_config import egmla_config, hf_config
from tests.hf_models import BASE, VARIANTS, build, generate, ids_of, one_thread

__all__ = ["one_thread"]  # a fixture, used by every test of the file


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_equal_the_oracle(model: ModelConfig, attention: str) -> None:
    reference, exported = build(model, attention)
    ids = ids_of(2, 19)
    torch.testing.assert_close(exported(ids).logits, reference(ids), rtol=1e-5, atol=1e-5)


def test_loss_and_gradients_equal_the_oracle() -> None:
    reference, exported = build(BASE)
    ids = ids_of(2, 12)
    loss = exported(ids, labels=ids).loss
    expected = reference.loss(ids[:, :-1], ids[:, 1:])
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    gradients = dict(exported.named_parameters())
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name].grad, parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_gradient_checkpointing_changes_nothing() -> None:
    _, exported = build(BASE)
    ids = ids_of(2, 12)
    exported.train()
    exported(ids, labels=ids).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in exported.named_parameters()}
    exported.zero_grad()
    exported.gradient_checkpointing_enable()
    exported(ids, labels=ids).loss.backward()
    for name, parameter in exported.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=name)


@pytest.mark.parametrize("model", VARIANTS.values(), ids=VARIANTS.keys())
def test_cached_generation_equals_recomputation(model: ModelConfig) -> None:
    _, exported = build(model)
    ids = ids_of(2, 7)
    for options in ({}, {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}):
        cached = generate(exported, ids, use_cache=True, **options)
        assert torch.equal(cached, generate(exported, ids, use_cache=False, **options)), options


def test_sampling_does_not_depend_on_the_cache() -> None:
    _, exported = build(BASE)
    results = []
    for use_cache in (True, False):
        torch.manual_seed(5)
        results.append(generate(exported, ids_of(3, 6), use_cache=use_cache, do_sample=True, num_return_sequences=2))
    assert torch.equal(*results)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_left_padded_batch_equals_single_prompts(attention: str) -> None:
    _, exported = build(BASE, attention)
    ids, lengths = ids_of(3, 8), (8, 5, 1)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, -length:] = 1
    batched = generate(exported, ids * mask, attention_mask=mask)
    for row, length in enumerate(lengths):
        assert torch.equal(batched[row, -length - 10 :], generate(exported, ids[row : row + 1, -length:])[0])


def test_right_padding_leaves_the_real_tokens_alone() -> None:
    reference, exported = build(BASE)
    ids = ids_of(2, 9)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    logits = exported(ids, attention_mask=mask).logits
    torch.testing.assert_close(logits[1, :5], reference(ids[1:, :5])[0], rtol=1e-5, atol=1e-5)


def test_assisted_decoding_crops_the_cache() -> None:
    _, exported = build(BASE)
    _, assistant = build(replace(BASE, num_layers=1))
    ids = ids_of(1, 9)
    options = {"max_new_tokens": 24, "eos_token_id": 0}  # without an end, older releases cannot look up prompts
    greedy = generate(exported, ids, **options)
    assert torch.equal(generate(exported, ids, prompt_lookup_num_tokens=3, **options), greedy)
    assert torch.equal(generate(exported, ids, assistant_model=assistant, **options), greedy)


def test_cache_holds_latents_and_nothing_else() -> None:
    _, exported = build(BASE)
    ids = ids_of(2, 11)
    cache = exported(ids, use_cache=True)[CACHE]
    assert isinstance(cache, EgmlaCache)
    elements = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert elements == 2 * 11 * BASE.num_layers * (BASE.kv_lora_rank + BASE.qk_rope_head_dim)
    assert cache.nbytes() == 2 * 11 * exported.config.kv_cache_elements_per_token * 4
    assert cache.token_ids_BT is not None and torch.equal(cache.token_ids_BT, ids)
    held = [value for layer in cache.layers for value in vars(layer).values() if isinstance(value, Tensor)]
    assert sum(value.numel() for value in held) == elements  # no state beside the two


def test_cache_operations_keep_ids_and_latents_together() -> None:
    _, exported = build(BASE)
    ids = ids_of(2, 8)
    expected = exported(torch.cat((ids, ids_of(2, 1)), dim=1)).logits[:, -1]

    def continued(cache: EgmlaCache, rows: list[int]) -> Tensor:
        return exported(ids_of(2, 1)[rows], cache=cache, use_cache=True).logits[:, -1]

    cache = exported(torch.cat((ids, ids), dim=1)[:, :13], use_cache=True)[CACHE]
    cache.crop(-5)
    assert cache.get_seq_length() == cache.token_ids_BT.shape[1] == 8
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 2, 1, 0]))
    cache.batch_select_indices(torch.tensor([0, 2]))
    torch.testing.assert_close(continued(cache, [1, 0]), expected[[1, 0]], rtol=1e-5, atol=1e-5)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.token_ids_BT is None
    assert exported(ids, cache=cache, use_cache=True).logits.shape == (2, 8, BASE.vocab_size)


def test_hidden_states_and_attentions_can_be_asked_for() -> None:
    _, exported = build(BASE, "eager")
    output = exported(ids_of(2, 6), output_hidden_states=True, output_attentions=True)
    assert [state.shape for state in output.hidden_states] == [(2, 6, BASE.hidden_size)] * (BASE.num_layers + 1)
    assert [weights.shape for weights in output.attentions] == [(2, BASE.num_attention_heads, 6, 6)] * BASE.num_layers
    torch.testing.assert_close(output.attentions[0].sum(-1), torch.ones(2, BASE.num_attention_heads, 6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close(dtype: torch.dtype) -> None:
    reference, exported = build(BASE)
    ids = ids_of(2, 9)
    expected = reference(ids)
    logits = exported.to(dtype)(ids).logits
    assert logits.dtype == dtype
    assert (logits.float() - expected).abs().max() < 0.1 * expected.std()


def test_initial_weights_give_gates_of_unit_scale() -> None:
    torch.manual_seed(0)
    wide = replace(BASE, kv_emb_dim=48, vocab_size=400, gate_table_init_std=0.5)
    exported: Any = EgmlaForCausalLM(EgmlaConfig(**hf_config(egmla_config(wide), dtype="float32", token_ids={})))
    attention = exported.model.layers[0].self_attn
    gates = attention.gate_proj(attention.gate_embed(torch.arange(400)))
    assert abs(attention.gate_embed.weight.std().item() - 0.5) < 0.02
    assert abs(gates.std().item() - 1) < 0.15
