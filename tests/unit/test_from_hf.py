"""Hugging Face folders back to checkpoints: bit-exact, complete or not there, refused when they do not fit."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from egmla_megatron.attention.reference import ReferenceModel
from egmla_megatron.checkpoint.manifest import is_complete, read_manifest, seal
from egmla_megatron.checkpoint.stored import StoredWeights
from egmla_megatron.config.schema import ModelConfig
from egmla_megatron.convert import from_hf
from egmla_megatron.convert.command import Export, convert_to_hf, shard_bytes
from egmla_megatron.convert.from_hf import import_hf
from egmla_megatron.convert.hf_config import hf_config
from egmla_megatron.convert.layouts import LAYOUTS, layout_of_folder
from egmla_megatron.convert.names import from_hf_tensors
from egmla_megatron.convert.new_folder import _clear_leftovers, new_folder
from egmla_megatron.convert.open_export import open_export
from egmla_megatron.convert.to_hf import export_hf
from egmla_megatron.errors import UserError
from tests.hf_models import BASE, VARIANTS, one_thread

__all__ = ["one_thread"]  # a fixture, used by every test of the file

MODELS = {
    **VARIANTS,
    "mha": replace(BASE, attention="mha", gate="none", kv_emb_dim=0, v_head_dim=8, max_position_embeddings=32),
}


def weights_of(model: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(0)
    random = {name: torch.randn_like(tensor) for name, tensor in ReferenceModel(model).state_dict().items()}
    return {name: tensor.to(dtype) for name, tensor in from_hf_tensors(random, model)}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_round_trips_are_bit_exact(model: ModelConfig, tmp_path: Path) -> None:
    dtype = torch.bfloat16
    weights = weights_of(model, dtype)
    folder = export_hf(weights, model, tmp_path / "hf x", dtype=dtype, max_shard_bytes=5000)
    checkpoint = import_hf(folder, tmp_path / "checkpoint", step=7)
    assert is_complete(checkpoint) and sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "hf x"]
    manifest = read_manifest(checkpoint)
    assert (manifest.step, manifest.weights_only) == (7, True)
    stored = StoredWeights(checkpoint)
    assert stored.keys() == weights.keys() and stored.dtype == dtype
    for name, expected in weights.items():
        assert tuple(stored[name].shape) == expected.shape
        assert torch.equal(stored[name][:], expected), name
    convert_to_hf(checkpoint, tmp_path / "again", Export(max_shard_bytes=5000))
    for file in [*folder.glob("*.safetensors"), folder / "config.json", folder / "model.safetensors.index.json"]:
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name


def test_vocabulary_is_padded_and_cut(tmp_path: Path) -> None:
    weights = weights_of(BASE)
    folder = export_hf(weights, BASE, tmp_path / "hf")
    stored = StoredWeights(import_hf(folder, tmp_path / "padded", vocab_size=64, dtype=torch.bfloat16))
    embedding, table = stored["embedding.word_embeddings.weight"][:], stored["gate_table.weight"]
    assert embedding.shape == (64, BASE.hidden_size) and tuple(table.shape) == (64, BASE.num_layers, BASE.kv_emb_dim)
    assert torch.equal(embedding[:61], weights["embedding.word_embeddings.weight"].bfloat16())
    mean = weights["embedding.word_embeddings.weight"].mean(0).bfloat16()
    assert torch.equal(embedding[61:], mean.expand(3, -1))
    assert torch.equal(table[:, 1], stored["gate_table.weight"][:][:, 1])
    fewer = StoredWeights(import_hf(folder, tmp_path / "fewer", vocab_size=50))
    for name in ("embedding.word_embeddings.weight", "gate_table.weight"):
        assert torch.equal(fewer[name][:], weights[name][:50]), name
    convert_to_hf(tmp_path / "padded", tmp_path / "cut", Export(vocab_size="61", dtype="fp32"))
    cut, _, model = open_export(tmp_path / "cut")
    assert model.vocab_size == 61
    before = open_export(folder)[0]
    assert all(torch.equal(cut[name], before[name].bfloat16().float()) for name in before)


def changed(**keys: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **keys}))

    return change


def without(pattern: str) -> Callable[[Path], None]:
    return lambda folder: next(folder.glob(pattern)).unlink()


def cut_short(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-100])


def other_index(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = sorted(set(content["weight_map"].values()))[0]
    index.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(num_hidden_layers=9999), "got num_hidden_layers 9999 in config.json, allowed at most"),
        (changed(kv_lora_rank=8), r"kv_a_proj_with_mqa\.weight has shape \(13, 24\), config.json says \(12, 24\)"),
        (changed(num_hidden_layers=1), r"unmapped \(model\.layers\.1"),
        (changed(num_hidden_layers=3), r"missing \(model\.layers\.2"),
        (changed(tie_word_embeddings=False), r"1 missing \(lm_head\.weight"),
        (changed(vocab_size=60), r"embed_tokens\.weight has shape \(61, 24\), config\.json says \(60, 24\)"),
        (changed(kv_lora_rank="nine"), "model.kv_lora_rank"),
        (changed(num_attention_heads=0), "model.num_attention_heads"),
        (changed(model_type=["egmla"]), r"model_type: got \['egmla'\], allowed egmla"),
        (changed(model_type="llama"), "model_type: got 'llama', allowed egmla"),
        (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
        (without("config.json"), "got no config.json"),
        (without("model-00002*.safetensors"), "got no model-00002"),
        (cut_short, "cannot be read"),
        (other_index, r"does not say what the files hold, first lm_head\.weight"),
    ],
)
def test_folders_that_do_not_fit(change: Callable[[Path], Any], message: str, exported: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(exported, folder)
    change(folder)
    with pytest.raises(UserError, match=message):
        import_hf(folder, tmp_path / "checkpoint")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_hf(weights_of(BASE), BASE, tmp_path_factory.mktemp("e") / "hf", max_shard_bytes=5000)


@pytest.mark.parametrize(
    ("layout", "key", "value", "message"),
    [
        ("egmla", "vocab_size", 10**30, "model.vocab_size: got 10+; allowed: at most"),
        ("egmla", "initializer_range", -1, "model.init_std: got -1"),
        ("egmla", "rope_scaling", {"type": "linear", "factor": 2.0}, "rope_scaling: got"),
        ("gpt2", "n_head", 0, "model.num_attention_heads: got 0"),
        ("gpt2", "n_embd", None, "model.hidden_size: got None"),
        ("gpt2", "attn_pdrop", 1.5, "model.attention_dropout: got 1.5"),
        ("deepseek_v3", "num_hidden_layers", "two", "model.num_layers: got 'two'"),
        ("deepseek_v3", "first_k_dense_replace", None, "first_k_dense_replace: got None"),
        ("deepseek_v3", "num_key_value_heads", 1, "num_key_value_heads: got 1, allowed 3"),
        ("deepseek_v3", "rms_norm_eps", None, "model.rms_norm_eps: got None"),
        ("deepseek_v3", "rope_theta", 5e5, "rope_theta: got 500000.0 beside 10000.0"),
        ("deepseek_v3", "rope_parameters", "x", "rope_parameters: got 'x'"),
        ("deepseek_v3", "rope_parameters", {}, r"rope_parameters: got \{\}"),
    ],
)
def test_configurations_changed_by_hand(layout: str, key: str, value: Any, message: str) -> None:
    name = {"egmla": "mul", "gpt2": "mha", "deepseek_v3": "mla"}[layout]
    config = hf_config(LAYOUTS[layout].config(MODELS[name]), dtype="float32", token_ids={})
    assert layout_of_folder(json.loads(json.dumps(config)))[1].num_layers == BASE.num_layers
    with pytest.raises(UserError, match=message):
        layout_of_folder({**config, key: value})


def test_mistakes_leave_nothing_behind(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(UserError, match="exists and was not made by from-hf"):
        import_hf(exported, tmp_path / "mine")
    trained = import_hf(exported, tmp_path / "trained")
    seal(trained, replace(read_manifest(trained), weights_only=False, files={}))
    with pytest.raises(UserError, match="exists and was not made by from-hf"):
        import_hf(exported, trained)
    shutil.rmtree(trained)
    with pytest.raises(UserError, match=r"is a Hugging Face folder; make a checkpoint of it"):
        convert_to_hf(exported, tmp_path / "new", Export())
    with pytest.raises(UserError, match="step: got -1"):
        import_hf(exported, tmp_path / "new", step=-1)
    with pytest.raises(UserError, match="vocab-size: got 0"):
        import_hf(exported, tmp_path / "new", vocab_size=0)
    for size in ("5 apples", "0", "9" * 400, "1e3", "-1"):
        with pytest.raises(UserError, match=f"max-shard-size: got '{size}'"):
            shard_bytes(size)
    assert [shard_bytes(text) for text in ("2", "5GB", "1.5 KiB")] == [2**21, 5 * 10**9, 1536]
    older = import_hf(exported, tmp_path / "older")
    before = (older / "manifest.json").read_bytes()

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(from_hf, "seal", interrupt)
    for name in ("older", "new"):
        with pytest.raises(KeyboardInterrupt):
            import_hf(exported, tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "older"]
    assert (older / "manifest.json").read_bytes() == before


def test_values_that_fp16_cannot_hold_are_named_on_the_way_back_too(tmp_path: Path) -> None:
    weights = weights_of(BASE)
    weights["decoder.layers.1.mlp.linear_fc2.weight"][0, 0] = 1e5
    folder = export_hf(weights, BASE, tmp_path / "hf")
    with pytest.raises(UserError, match=r"^model\.layers\.1\.mlp\.down_proj\.weight: holds values that fp16 cannot"):
        import_hf(folder, tmp_path / "checkpoint", dtype=torch.float16)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_disk_that_fills_up_and_a_signal(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", full)
    with pytest.raises(UserError, match="No space left on device"):
        import_hf(exported, tmp_path / "new")
    with pytest.raises(SystemExit) as caught, new_folder(tmp_path / "new") as folder:
        (folder / "file").touch()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    assert caught.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert not list(tmp_path.iterdir())


def test_leftovers_of_killed_conversions_go(tmp_path: Path) -> None:
    def make(*names: str) -> None:
        for name in names:
            (tmp_path / name).mkdir()
            (tmp_path / name / name.rpartition("-")[2]).touch()

    def names() -> list[str]:
        return sorted(path.name for path in tmp_path.iterdir())

    make(".new.partial-1", ".new.older-1", ".new.partial-x", ".other.partial-1")  # killed between the two renames
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "new"):
        raise KeyboardInterrupt
    assert names() == [".new.partial-x", ".other.partial-1", "new"]
    assert (tmp_path / "new" / "1").is_file()  # the older one is back
    make(".new.older-2")
    with new_folder(tmp_path / "new") as running:
        make(".new.partial-3")
        _clear_leftovers(tmp_path / "new")  # what a second process does: the first one is at work
        assert running.is_dir() and (tmp_path / ".new.partial-3").is_dir()
        (running / "file").touch()
    assert (tmp_path / "new" / "file").is_file()
    with new_folder(tmp_path / "new"):
        pass
    assert names() == [".new.partial-x", ".other.partial-1", "new"]


def test_a_stored_part_that_is_missing_is_named(exported: Path, tmp_path: Path) -> None:
    stored = StoredWeights(import_hf(exported, tmp_path / "checkpoint"))
    table: Any = stored["gate_table.weight"]
    assert torch.equal(table[3:5, 1, 2:], table[:][3:5, 1, 2:])
    with pytest.raises(IndexError):
        table[:, 5]
    del table.entry.chunks[0]
    with pytest.raises(UserError, match=r"holds only a part of gate_table\.weight"):
        table[:]
    file = next((tmp_path / "checkpoint").glob("*.distcp"))
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(UserError, match="cannot be read"):
        stored["decoder.final_layernorm.weight"][:]
    metadata = tmp_path / "checkpoint" / ".metadata"
    whole = metadata.read_bytes()
    for damaged in (bytes(len(whole)), whole[: len(whole) // 2]):
        metadata.write_bytes(damaged)
        with pytest.raises(UserError, match=r"metadata cannot be read"):
            StoredWeights(tmp_path / "checkpoint")
    with pytest.raises(UserError, match="holds no complete checkpoint"):
        (tmp_path / "checkpoint" / "COMPLETE").unlink()
        convert_to_hf(tmp_path / "checkpoint", tmp_path / "no", Export())
