"""What the Hugging Face model takes and gives: configurations, masks, caches, switches; and what it says it cannot."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from egmla_megatron.convert.hf import modeling_egmla
from egmla_megatron.convert.hf.configuration_egmla import EgmlaConfig
from egmla_megatron.convert.hf.modeling_egmla import CACHE, EgmlaCache
from egmla_megatron.convert.hf_config import egmla_config, hf_config
from egmla_megatron.convert.layouts import LAYOUTS
from tests.hf_models import BASE, build, generate, ids_of, one_thread

__all__ = ["one_thread"]  # a fixture, used by every test of the file


@pytest.mark.parametrize(
    ("key", "value"), [("gate", "relu"), ("kv_group_size", 2), ("kv_emb_dim", 0), ("qk_rope_head_dim", 3)]
)
def test_impossible_configurations_are_named(key: str, value: Any) -> None:
    config = {**hf_config(egmla_config(BASE), dtype="float32", token_ids={}), key: value}
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
    assert {path.name for path in folder.glob("*.py")} == {*LAYOUTS["egmla"].remote_code, "__init__.py"}
    for name in LAYOUTS["egmla"].remote_code:
        for node in ast.walk(ast.parse((folder / name).read_text())):
            if isinstance(node, ast.Import):
                assert {alias.name for alias in node.names} <= {"torch", "math"}, name
            elif isinstance(node, ast.ImportFrom) and node.level:
                assert f"{node.module}.py" in LAYOUTS["egmla"].remote_code, name
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
