"""The exported folder: loads through the auto classes, holds what its index says, is never half there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from egmla_megatron.attention.reference import ReferenceModel
from egmla_megatron.config.schema import ModelConfig
from egmla_megatron.convert import new_folder, to_hf
from egmla_megatron.convert.layouts import LAYOUTS, hf_shapes, layout_for, layout_of_folder, read_hf_config
from egmla_megatron.convert.names import from_hf_tensors, to_hf_tensors
from egmla_megatron.convert.open_export import open_export
from egmla_megatron.convert.to_hf import export_hf
from egmla_megatron.convert.verify import Comparison, compare, hf_logits, load_model
from egmla_megatron.data.train_tokenizer import train_sentencepiece
from egmla_megatron.errors import UserError
from egmla_megatron.inference.generate import Sampling, generate, load_exported

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    intermediate_size=24,
    qk_nope_head_dim=5,
    qk_rope_head_dim=4,
    v_head_dim=3,
    kv_lora_rank=7,
    kv_emb_dim=6,
    vocab_size=640,
    max_position_embeddings=64,
)


def weights_of(model: ModelConfig) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return dict(from_hf_tensors(dict(ReferenceModel(model).state_dict()), model))


@torch.no_grad()
def difference(
    folder: Path, weights: dict[str, Tensor], model: ModelConfig, ids: Tensor, dtype: torch.dtype = torch.float32
) -> Comparison:
    """The export's logits against the oracle's with the same (rounded) weights."""
    reference = ReferenceModel(model)
    reference.load_state_dict({name: tensor.to(dtype) for name, tensor in to_hf_tensors(weights, model)})
    return compare(hf_logits(folder, ids), reference(ids))


def on_disk(folder: Path) -> dict[str, Tensor]:
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (not a mapping)
                assert name not in tensors
                tensors[name] = shard.get_tensor(name)
    return tensors


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = Path(json.__file__).read_text(encoding="utf-8")
    return train_sentencepiece([text], tmp_path_factory.mktemp("t") / "t.model", vocab_size=600)


def test_export_loads_verifies_and_generates(tokenizer_file: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModel

    weights = weights_of(MODEL)
    folder = export_hf(weights, MODEL, tmp_path / "with space", tokenizer=tokenizer_file, card={"tokens": "1M"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["with space"]
    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=True)
    assert (config.model_type, config.eos_token_id, config.kv_cache_elements_per_token) == ("egmla", 2, 22)
    assert AutoModel.from_pretrained(str(folder), trust_remote_code=True).norm.weight.shape == (16,)
    result = difference(folder, weights, MODEL, torch.randint(640, (2, 20)))
    assert result.equal and result.max_abs < 1e-5 and result.greedy_agreement == 1
    model, tokenizer = load_exported(folder, device="cpu")
    assert model.generation_config.eos_token_id == 2
    sampling = Sampling(max_new_tokens=5)
    prompts = ["def f(x):\n", "", "import"]
    samples = generate(model, tokenizer, prompts, sampling, num_samples=2)
    assert samples == generate(model, tokenizer, prompts, sampling, num_samples=2)
    assert [len(row) for row in samples] == [2, 2, 2] and any(any(row) for row in samples)
    greedy = replace(sampling, temperature=0.0)
    alone = [generate(model, tokenizer, [prompt], greedy)[0] for prompt in prompts]
    assert generate(model, tokenizer, prompts, greedy) == alone  # padding changes nothing
    assert "| tokens | 1M |" in (folder / "README.md").read_text()


@pytest.mark.parametrize("tied", [True, False])
def test_shards_and_index_agree(tmp_path: Path, tied: bool) -> None:
    model = replace(MODEL, tie_word_embeddings=tied)
    folder = export_hf(weights_of(model), model, tmp_path / "hf", max_shard_bytes=20_000, dtype=torch.bfloat16)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors = on_disk(folder)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == hf_shapes(model)
    assert ("lm_head.weight" in tensors) is not tied
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert set(index["weight_map"].values()) == {path.name for path in folder.glob("*.safetensors")}
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert layout_of_folder(read_hf_config(folder))[1] == replace(model, name=ModelConfig.name)
    assert difference(folder, weights_of(model), model, torch.randint(640, (1, 9)), torch.bfloat16).max_abs < 1e-5


def test_vocabulary_padding_can_be_cut(tokenizer_file: Path, tmp_path: Path) -> None:
    weights = weights_of(MODEL)
    folder = export_hf(weights, MODEL, tmp_path / "hf", tokenizer=tokenizer_file, vocab_size=600)
    tensors = on_disk(folder)
    assert tensors["model.layers.1.self_attn.gate_embed.weight"].shape == (600, 6)
    assert difference(folder, weights, MODEL, torch.randint(600, (1, 9))).max_abs < 1e-5
    with pytest.raises(UserError, match="got 600 ids, allowed at most the model's 500 rows"):
        export_hf(weights, MODEL, tmp_path / "no", tokenizer=tokenizer_file, vocab_size=500)


def test_failure_leaves_nothing_and_keeps_the_older_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weights_of(MODEL)
    folder = export_hf(weights, MODEL, tmp_path / "hf")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    incomplete = {name: tensor for name, tensor in weights.items() if "linear_fc2" not in name}
    with pytest.raises(UserError, match=r"2 missing \(decoder\.layers\.0\.mlp\.linear_fc2\.weight"):
        export_hf(incomplete, MODEL, folder)

    def interrupt(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(to_hf, "model_card", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_hf(weights, MODEL, folder)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    export_hf(weights, MODEL, folder, dtype=torch.float16)
    assert on_disk(folder)["model.norm.weight"].dtype == torch.float16
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_user_mistakes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weights_of(MODEL)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(UserError, match="is no export of this project"):
        export_hf(weights, MODEL, tmp_path / "other")
    with pytest.raises(UserError, match=r"kv_b_proj\.weight: got shape \(16, 7\), the configuration says \(16, 8\)"):
        wider = replace(MODEL, kv_lora_rank=8)
        export_hf(
            {**weights_of(wider), **{k: v for k, v in weights.items() if "up.weight" in k}}, wider, tmp_path / "x"
        )
    with pytest.raises(UserError, match=r"model\.norm\.weight: holds values that fp16 cannot"):
        large = {**weights, "decoder.final_layernorm.weight": torch.full((16,), 1e6)}
        export_hf(large, MODEL, tmp_path / "x", dtype=torch.float16)
    monkeypatch.setattr(new_folder.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(UserError, match="0 MiB free, the result needs"):
        export_hf(weights, MODEL, tmp_path / "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other"]


PLAIN = replace(MODEL, gate="none", kv_emb_dim=0, q_lora_rank=6)
MHA = replace(PLAIN, attention="mha", q_lora_rank=0, v_head_dim=8, tie_word_embeddings=False)


@pytest.mark.parametrize(("name", "model"), [("deepseek_v3", PLAIN), ("gpt2", MHA)])
def test_baselines_load_as_classes_of_transformers(name: str, model: ModelConfig, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    weights = weights_of(model)
    assert all(weights[key].std() > 0 or "norm" in key or "bias" in key for key in weights)
    folder = export_hf(weights, model, tmp_path / "hf", layout=layout_for(model, name), vocab_size=600)
    loaded: Any = AutoModelForCausalLM.from_pretrained(str(folder))
    assert (loaded.config.model_type, loaded.config.vocab_size, loaded.config.eos_token_id) == (name, 600, None)
    assert type(loaded).__module__.startswith("transformers.models.")
    assert not list(folder.glob("*.py"))
    result = difference(folder, weights, model, torch.randint(600, (2, 33)))
    assert result.max_abs < 2e-5 and result.largest > 0.05
    assert layout_of_folder(read_hf_config(folder)) == (
        LAYOUTS[name],
        replace(model, vocab_size=600, name=ModelConfig.name, **({} if name == "deepseek_v3" else UNUSED_BY_MHA)),
    )


_DEFAULT = ModelConfig()
UNUSED_BY_MHA: dict[str, Any] = {
    key: getattr(_DEFAULT, key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank")
}


@pytest.mark.parametrize(
    ("name", "model", "message"),
    [
        ("egmla", MHA, "got egmla for model.attention=mha"),
        ("gpt2", MODEL, "got gpt2 for model.attention=mla"),
        ("deepseek_v3", MODEL, "got deepseek_v3 for model.gate=mul"),
        ("deepseek_v3", replace(PLAIN, rms_norm_eps=1e-5), "eps 1e-06 in the norms of its latents"),
    ],
)
def test_layouts_that_would_compute_something_else(name: str, model: ModelConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        layout_for(model, name)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_hidden_layers": 3}, r"tensors are missing for .* model\.layers\.2"),
        ({"num_hidden_layers": 1}, r"tensors have no place in .* model\.layers\.1"),
        ({"kv_lora_rank": 8}, r"6 tensors have other shapes than .*kv_a_proj_with_mqa\.weight"),
        ({"tie_word_embeddings": False}, r"1 tensors are missing for .* lm_head\.weight"),
    ],
)
def test_a_configuration_changed_by_hand_does_not_load(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    from transformers import AutoModel, AutoModelForCausalLM

    folder = export_hf(weights_of(MODEL), MODEL, tmp_path / "hf")
    AutoModel.from_pretrained(str(folder), trust_remote_code=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))
    with pytest.raises((ValueError, RuntimeError), match=message):
        AutoModelForCausalLM.from_pretrained(str(folder), trust_remote_code=True)
    with pytest.raises(UserError, match=r"config\.json|Hugging Face tensors do not fit"):
        open_export(folder)


def test_what_transformers_saves_again_is_the_same_model(tmp_path: Path) -> None:
    folder = export_hf(weights_of(MODEL), MODEL, tmp_path / "hf")
    load_model(folder).save_pretrained(tmp_path / "again")
    weights, layout, model = open_export(tmp_path / "again")
    assert (layout.name, model) == ("egmla", open_export(folder)[2])
    assert all(torch.equal(weights[name], tensor) for name, tensor in on_disk(folder).items())


def test_prompts_that_do_not_fit(tokenizer_file: Path, tmp_path: Path) -> None:
    folder = export_hf(weights_of(MODEL), MODEL, tmp_path / "hf", tokenizer=tokenizer_file)
    model, tokenizer = load_exported(folder, device="cpu")
    with pytest.raises(UserError, match="allowed 64"):
        generate(model, tokenizer, ["a"], Sampling(max_new_tokens=64))
    with pytest.raises(UserError, match="top_p: got 0"):
        generate(model, tokenizer, ["a"], Sampling(top_p=0.0))
    with pytest.raises(UserError, match="num_samples: got 2 with temperature 0"):
        generate(model, tokenizer, ["a"], Sampling(temperature=0.0), num_samples=2)
