"""Exported models on GPUs: the latent cache, finished gates on the device and on the host, layers on two GPUs."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from egmla_megatron.config.schema import ModelConfig
from tests.gpu.small_model import SMALL
from tests.hf_models import build, generate

pytestmark = pytest.mark.gpu

# large enough that a copy from the host is still under way when the layer starts
BASE = replace(SMALL, vocab_size=5000, max_position_embeddings=1024)
PLACES = ["device", "host"]


def some_ids(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(1, BASE.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def on_gpu(model: ModelConfig = BASE, dtype: torch.dtype = torch.float32) -> Any:
    torch.backends.cuda.matmul.allow_tf32 = False
    return build(model)[1].to("cuda", dtype)


def in_steps(model: Any, ids: Tensor, first: int) -> Tensor:
    """Logits of a cached decoding: `first` tokens at once, then one at a time."""
    output = model(ids[:, :first], use_cache=True)
    logits = [output.logits]
    cache = output["cache" if "cache" in output else "past_key_values"]
    for place in range(first, ids.shape[1]):
        logits.append(model(ids[:, place : place + 1], past_key_values=cache).logits)
    assert cache.nbytes() == ids.numel() * BASE.num_layers * (64 + 64) * logits[0].element_size()
    return torch.cat(logits, dim=1)


@torch.inference_mode()
def test_the_gpu_computes_what_the_cpu_does_and_a_cache_changes_nothing() -> None:
    ids = some_ids(2, 300)
    expected = build(BASE)[1](ids).logits
    model = on_gpu()
    whole = model(ids.cuda()).logits
    torch.testing.assert_close(whole.cpu(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(in_steps(model, ids.cuda(), 44), whole, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_with_and_without_a_cache(dtype: torch.dtype) -> None:
    ids = some_ids(2, 200).cuda()
    reference = on_gpu()(ids).logits
    model = on_gpu(dtype=dtype)
    for logits in (model(ids).logits, in_steps(model, ids, 150)):
        assert (logits.float() - reference).norm() < 0.05 * reference.norm()


@torch.inference_mode()
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("gate", ["mul", "add"])
def test_finished_gates_change_nothing(gate: Any, place: str) -> None:
    model = on_gpu(replace(BASE, gate=gate))
    ids = [some_ids(4, 700, seed).cuda() for seed in range(4)]
    expected, text = [model(each).logits for each in ids], generate(model, ids[0][:, :50])
    model.precompute_gates(on_host=place == "host")
    table = model.base_model.layers[0].self_attn.finished_gates.table_WU
    assert (table.device.type, table.is_pinned()) == (("cpu", True) if place == "host" else ("cuda", False))
    found = [model(each).logits for each in ids]  # one behind the other: a late copy would meet the next one's rows
    for each, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(each, wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(generate(model, ids[0][:, :50]), text)


@torch.inference_mode()
@pytest.mark.parametrize("place", [None, *PLACES])
def test_layers_on_two_gpus(tmp_path: Path, place: str | None) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    model, ids = on_gpu(), some_ids(2, 100).cuda()
    expected, text = model(ids).logits, generate(model, ids)
    model.save_pretrained(tmp_path)
    here = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 0, "model.norm": 1, "lm_head": 0}
    spread = type(model).from_pretrained(
        tmp_path, device_map=here | {"model.layers.2": 1, "model.layers.3": 1}, dtype=torch.float32
    )
    assert {parameter.device.index for parameter in spread.parameters()} == {0, 1}
    if place:
        spread.precompute_gates(on_host=place == "host")
    torch.testing.assert_close(spread(ids).logits.to(expected.device), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(generate(spread, ids), text)
