"""The Hugging Face model equals the oracle, caches latents only, and generates with the cache as without it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from egmla_megatron.attention.reference import ReferenceModel
from egmla_megatron.config.schema import ModelConfig
from egmla_megatron.convert.hf import modeling_egmla
from egmla_megatron.convert.hf.configuration_egmla import EgmlaConfig
from egmla_megatron.convert.hf.modeling_egmla import CACHE, EgmlaCache, EgmlaForCausalLM
from egmla_megatron.convert.hf_config import hf_config
from egmla_megatron.convert.to_hf import REMOTE_CODE
from tests.tiny import gate_variants

BASE = ModelConfig(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=3,
    intermediate_size=20,
    qk_nope_head_dim=7,
    qk_rope_head_dim=4,
    v_head_dim=5,
    kv_lora_rank=9,
    kv_emb_dim=6,
    vocab_size=61,
    init_std=0.2,
)
VARIANTS = {
    **gate_variants(BASE),
    "mla": replace(BASE, gate="none", kv_emb_dim=0),
    "q_lora_untied": replace(BASE, q_lora_rank=5, tie_word_embeddings=False),
    "even": replace(BASE, qk_nope_head_dim=8, v_head_dim=8, kv_lora_rank=8, kv_emb_dim=8, num_attention_heads=2),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small are fastest on one thread, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(model: ModelConfig, attention: str = "sdpa") -> tuple[ReferenceModel, Any]:
    """The oracle and a Hugging Face model with the same random weights (norms included)."""
    torch.manual_seed(1)
    reference = ReferenceModel(model)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    config = EgmlaConfig(**hf_config(model, dtype="float32", token_ids={"pad_token_id": 0}))
    config._attn_implementation = attention
    exported = EgmlaForCausalLM(config)
    missing, unexpected = exported.load_state_dict(reference.state_dict(), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    exported.tie_weights()
    return reference, exported.eval()


def ids_of(batch: int, length: int) -> Tensor:
    return torch.randint(1, BASE.vocab_size, (batch, length), generator=torch.Generator().manual_seed(3))


def generate(exported: Any, ids: Tensor, **options: Any) -> Tensor:
    settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, **options}
    return exported.generate(ids, **settings)


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
    exported: Any = EgmlaForCausalLM(EgmlaConfig(**hf_config(wide, dtype="float32", token_ids={})))
    attention = exported.model.layers[0].self_attn
    gates = attention.gate_proj(attention.gate_embed(torch.arange(400)))
    assert abs(attention.gate_embed.weight.std().item() - 0.5) < 0.02
    assert abs(gates.std().item() - 1) < 0.15


@pytest.mark.parametrize(
    ("key", "value"), [("gate", "relu"), ("kv_group_size", 2), ("kv_emb_dim", 0), ("qk_rope_head_dim", 3)]
)
def test_impossible_configurations_are_named(key: str, value: Any) -> None:
    config = {**hf_config(BASE, dtype="float32", token_ids={}), key: value}
    with pytest.raises(ValueError, match=f"{key}: got"):
        EgmlaConfig(**config)


def test_packed_sequences_do_not_see_each_other() -> None:
    reference, exported = build(BASE)
    first, second = ids_of(2, 5), ids_of(2, 12)[:, 5:]
    positions = torch.cat((torch.arange(5), torch.arange(7))).expand(2, -1)
    logits = exported(torch.cat((first, second), dim=1), position_ids=positions).logits
    expected = torch.cat((reference(first), reference(second)), dim=1)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_of_four_dimensions_is_taken_as_it_is(attention: str, additive: bool) -> None:
    reference, exported = build(BASE, attention)
    ids = ids_of(2, 9)
    mask = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
    if additive:
        mask = torch.zeros(1, 1, 9, 9).masked_fill(~mask, float("-inf"))
    torch.testing.assert_close(exported(ids, attention_mask=mask).logits, reference(ids), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_prompt_in_parts_equals_the_whole(attention: str) -> None:
    """Several new tokens behind cached ones, without a mask and with one: the causal square is not in the corner."""
    _, exported = build(BASE, attention)
    ids = ids_of(2, 11)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    for given in (None, mask):
        whole = exported(ids, attention_mask=given).logits
        before = None if given is None else given[:, :6]
        cache = exported(ids[:, :6], attention_mask=before, use_cache=True)[CACHE]
        parts = exported(ids[:, 6:], attention_mask=given, cache=cache).logits
        torch.testing.assert_close(parts, whole[:, 6:], rtol=1e-5, atol=1e-5)


def test_the_cache_may_come_under_either_name() -> None:
    _, exported = build(BASE)
    ids = ids_of(2, 8)
    for name in ("cache", "past_key_values"):
        cache: Any = EgmlaCache(exported.config)
        exported(ids[:, :6], **{name: cache})
        assert cache.get_seq_length() == 6
        logits = exported(ids[:, 6:], **{name: cache}).logits
        torch.testing.assert_close(logits, exported(ids).logits[:, 6:], rtol=1e-5, atol=1e-5)


def test_logits_of_some_positions_and_plain_tuples() -> None:
    _, exported = build(BASE)
    ids = ids_of(2, 8)
    logits = exported(ids).logits
    assert torch.equal(exported(ids, logits_to_keep=0).logits, logits)
    torch.testing.assert_close(exported(ids, logits_to_keep=3).logits, logits[:, -3:])
    torch.testing.assert_close(exported(ids, logits_to_keep=torch.tensor([1, 4])).logits, logits[:, [1, 4]])
    for model in (exported, exported.model):
        assert type(model(ids, return_dict=False)) is tuple
    assert torch.equal(exported(ids, return_dict=False)[0], logits)


# what transformers 4.56 and every release since have under these names; anything else would bind exports to a release
STABLE = {
    "transformers": {"PretrainedConfig"},
    "transformers.cache_utils": {"Cache", "DynamicLayer"},
    "transformers.generation": {"GenerationMixin"},
    "transformers.modeling_layers": {"GradientCheckpointingLayer"},
    "transformers.modeling_outputs": {"BaseModelOutputWithPast", "CausalLMOutputWithPast"},
    "transformers.modeling_utils": {"PreTrainedModel"},
}


def test_exported_code_imports_only_names_that_last() -> None:
    folder = Path(modeling_egmla.__file__).parent
    assert {path.name for path in folder.glob("*.py")} == {*REMOTE_CODE, "__init__.py"}
    for name in REMOTE_CODE:
        for node in ast.walk(ast.parse((folder / name).read_text())):
            if isinstance(node, ast.Import):
                assert {alias.name for alias in node.names} <= {"torch", "math"}, name
            elif isinstance(node, ast.ImportFrom) and node.level:
                assert f"{node.module}.py" in REMOTE_CODE, name
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers"):
                assert {alias.name for alias in node.names} <= STABLE.get(str(node.module), set()), name


def test_what_the_model_cannot_do_is_said() -> None:
    from transformers import DynamicCache

    _, exported = build(BASE)
    with pytest.raises(ValueError, match="needs input_ids"):
        exported(inputs_embeds=torch.zeros(1, 2, 24))
    with pytest.raises(TypeError, match="got DynamicCache, allowed EgmlaCache"):
        exported(ids_of(1, 2), cache=DynamicCache(config=exported.config))
    with pytest.raises(ValueError, match="attention_mask: got 3 columns, allowed 2"):
        exported(ids_of(1, 2), attention_mask=torch.ones(1, 3))
    with pytest.raises(ValueError, match="cache_implementation: got 'static'"):
        generate(exported, ids_of(1, 2), cache_implementation="static")
    exported.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attn_implementation: got 'flash_attention_2', allowed sdpa, eager"):
        exported(ids_of(1, 2))
    exported.config._attn_implementation = "sdpa"
    exported.gradient_checkpointing_enable()
    exported.train()
    with pytest.raises(ValueError, match="cache: got one while gradient checkpointing trains"):
        exported(ids_of(1, 2), cache=EgmlaCache(exported.config))
