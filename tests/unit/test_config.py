"""Loading: types, includes, overrides, messages; what makes two models the same architecture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from egmla_megatron.config.load import (
    architecture,
    architecture_difference,
    dump_yaml,
    from_dict,
    load_config,
    to_dict,
)
from egmla_megatron.config.schema import ModelConfig, RunConfig
from egmla_megatron.errors import UserError


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def _config(tmp_path: Path, text: str = "model:\n  name: x\n") -> Path:
    return _write(tmp_path / "config.yaml", text)


def test_section_without_keys_gives_its_defaults(tmp_path: Path) -> None:
    text = "model:\n  name: x\ntrain:\n  # steps: 3\n"
    assert load_config(_config(tmp_path, text)) == replace(RunConfig(), model=ModelConfig(name="x"))


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "include: empty.yaml\nmodel:\n  name: x\n"])
def test_an_empty_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    _write(tmp_path / "empty.yaml", "\n")
    with pytest.raises(UserError, match=r"(config|empty)\.yaml is empty; allowed: sections run, model"):
        load_config(_config(tmp_path, text))


@pytest.mark.parametrize("text", ["train:\n  steps: 3\n", "model:\n", "include: part.yaml\n"])
def test_the_default_model_is_never_taken_unasked(tmp_path: Path, text: str) -> None:
    _write(tmp_path / "part.yaml", "train:\n  steps: 3\n")
    path = _config(tmp_path, text)
    with pytest.raises(UserError, match=r"config\.yaml: got no section model"):
        load_config(path)
    assert load_config(path, ["model.num_layers=3"]).model == ModelConfig(num_layers=3)


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("optimizer.lr=6e-4", "optimizer", "lr", 6e-4),
        ("optimizer.lr=1", "optimizer", "lr", 1.0),
        ("train.steps=1_000", "train", "steps", 1000),
        ("train.tokens=5e10", "train", "tokens", 50_000_000_000),
        ("data.eod_id=-1", "data", "eod_id", -1),
        ("parallel.sequence=true", "parallel", "sequence", True),
        ("parallel.sequence=False", "parallel", "sequence", False),
        ("model.gate=none", "model", "gate", "none"),
        ("run.name=007", "run", "name", "007"),
        ("run.dir=a b/#1: x", "run", "dir", "a b/#1: x"),
        ("run.dir='quoted'", "run", "dir", "quoted"),
        ("checkpoint.load=", "checkpoint", "load", ""),
        ("data.train=[a, b]", "data", "train", ("a", "b")),
        ("data.train=0.3,a,0.7,b", "data", "train", ("0.3", "a", "0.7", "b")),
        ("data.valid=[]", "data", "valid", ()),
        ("profile.steps=[10, 12]", "profile", "steps", (10, 12)),
        ("profile.steps=10,12", "profile", "steps", (10, 12)),
        ("profile.steps=[]", "profile", "steps", ()),
    ],
)
def test_override(tmp_path: Path, override: str, section: str, key: str, value: object) -> None:
    got = getattr(getattr(load_config(_config(tmp_path), [override]), section), key)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("model.num_layers=12.0", ["model.num_layers", "'12.0'", "whole number"]),
        ("model.num_layers=true", ["model.num_layers", "whole number"]),
        ("model.num_layers=1.5e0", ["whole number"]),
        ("optimizer.lr=fast", ["optimizer.lr", "'fast'", "number"]),
        ("optimizer.lr=nan", ["finite"]),
        ("optimizer.lr=[1]", ["finite number"]),
        ("parallel.sequence=yes", ["parallel.sequence", "'yes'", "true or false"]),
        ("parallel.sequence=1", ["true or false"]),
        ("parallel.sequence=auto", ["parallel.sequence", "'auto'", "true or false"]),
        ("train.cuda_graph=on", ["train.cuda_graph", "'on'", "allowed: true, false, auto"]),
        ("train.cuda_graph=[auto]", ["train.cuda_graph", "['auto']", "allowed: true, false, auto"]),
        ("train.cuda_graph=", ["train.cuda_graph", "''", "allowed: true, false, auto"]),
        ("model.gate=mull", ["model.gate", "'mull'", "mul, add, none"]),
        ("run.name=null", ["run.name", "''"]),
        ("data.train=[[a]]", ["data.train", "list"]),
        ("data.train=[a", ["close"]),
        ("profile.steps=[1, b]", ["profile.steps", "list of whole numbers"]),
        ("profile.ranks=1.5", ["profile.ranks", "list of whole numbers"]),
        ("train.seq_lenght=5", ["train.seq_lenght=5", "'seq_lenght'", "did you mean seq_length?"]),
        ("trian.steps=5", ["'trian'", "did you mean train?"]),
        ("train.qqqq=5", ["allowed: seq_length, micro_batch_size"]),
        ("steps=5", ["section.key=value"]),
        ("train.steps", ["section.key=value"]),
    ],
)
def test_bad_override_says_what_is_allowed(tmp_path: Path, override: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load_config(_config(tmp_path), [override])
    for part in ["override", *parts]:
        assert part in str(caught.value)


def test_yaml_types_follow_the_field(tmp_path: Path) -> None:
    text = (
        "model:\n  name: x\nrun:\n  name: 010\noptimizer:\n  lr: 6e-4\ndata:\n  train: [0.3, a, 0.7, b]\n  valid: c\n"
    )
    cfg = load_config(_config(tmp_path, text))
    assert cfg.run.name == "010"
    assert cfg.optimizer.lr == 6e-4
    assert cfg.data.train == ("0.3", "a", "0.7", "b")
    assert cfg.data.valid == ("c",)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("model:\n  num_layer: 3\n", ["config.yaml", "num_layer", "did you mean num_layers?"]),
        ("modell:\n  num_layers: 3\n", ["config.yaml", "did you mean model?"]),
        ("model:\n  num_layers: many\n", ["config.yaml", "model.num_layers", "'many'"]),
        ("model: 3\n", ["config.yaml", "section model", "'3'"]),
        ("- a\n", ["config.yaml", "list", "sections"]),
        ("model: [\n", ["config.yaml", "not valid YAML"]),
        ("train:\n  cuda_graph: maybe\n", ["config.yaml", "train.cuda_graph", "'maybe'", "true, false, auto"]),
        ("train:\n  steps: 1\n  steps: 2\n", ["config.yaml", "'steps' stands twice"]),
        ("text\n", ["config.yaml", "got a str", "sections"]),
        ("model:\n\tname: x\n", ["config.yaml", "not valid YAML", "'\\t'"]),
        ("model:\n  name: x\nmodel:\n  name: y\n", ["config.yaml", "'model' stands twice"]),
        ("? [a]\n: b\n", ["config.yaml", "not valid YAML", "is no name"]),
        ("model: {name: x}\n---\nmodel: {name: y}\n", ["config.yaml", "not valid YAML", "single document"]),
        ("include: {a: b}\n", ["config.yaml", "include"]),
        ("include: [gone.yaml]\n", ["config.yaml", "gone.yaml", "not there"]),
    ],
)
def test_bad_file_is_named(tmp_path: Path, text: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load_config(_config(tmp_path, text))
    for part in parts:
        assert part in str(caught.value)


def test_includes_are_relative_and_later_wins(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    _write(tmp_path / "parts" / "one.yaml", "include: two.yaml\nmodel:\n  num_layers: 1\n  hidden_size: 1\n")
    _write(tmp_path / "parts" / "two.yaml", "model:\n  num_layers: 2\n  vocab_size: 2\n")
    _write(tmp_path / "parts" / "three.yaml", "model:\n  hidden_size: 3\n  kv_emb_dim: 3\n")
    text = "include: [parts/one.yaml, parts/three.yaml]\nmodel:\n  kv_emb_dim: 4\n"
    model = load_config(_config(tmp_path, text), ["model.q_lora_rank=5"]).model
    assert (model.num_layers, model.vocab_size, model.hidden_size, model.kv_emb_dim) == (1, 2, 3, 4)
    assert model.q_lora_rank == 5


def test_a_bad_value_that_is_overridden_still_names_the_override(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"override 'train.steps=b'"):
        load_config(_config(tmp_path, "train:\n  steps: a\n"), ["train.steps=b"])


def test_include_cycle_is_refused(tmp_path: Path) -> None:
    _write(tmp_path / "other.yaml", "include: [config.yaml]\n")
    with pytest.raises(UserError, match=r"include cycle: .*config.yaml -> .*other.yaml -> .*config.yaml"):
        load_config(_config(tmp_path, "include: [other.yaml]\n"))


def test_the_same_file_may_be_included_twice(tmp_path: Path) -> None:
    _write(tmp_path / "shared.yaml", "train:\n  steps: 3\n")
    for name in ("a", "b"):
        _write(tmp_path / f"{name}.yaml", "include: shared.yaml\n")
    text = "include: [a.yaml, b.yaml]\nmodel:\n  name: x\n"
    assert load_config(_config(tmp_path, text)).train.steps == 3


def test_missing_file_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'pretrain_bas' is not there.*nearest: pretrain_base"):
        load_config("pretrain_bas")
    with pytest.raises(UserError, match="is a folder"):
        load_config(tmp_path)


def test_a_name_like_none_lists_every_one_once() -> None:
    with pytest.raises(UserError) as caught:
        load_config("xyzzy")
    names = str(caught.value).partition("; names: ")[2].split(", ")
    assert names.count("quickstart") == 1 and len(names) == len(set(names)) > 15


def test_bare_names(root: Path) -> None:
    assert load_config("pretrain_base") == load_config(root / "configs" / "run" / "pretrain_base.yaml")
    assert load_config("mha_base.yaml") == load_config(root / "configs" / "model" / "mha_base.yaml")


def test_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(b"\xff\xfe\x00model")
    with pytest.raises(UserError, match=r"config.yaml (cannot be read|is not valid)"):
        load_config(path)


def test_dump_reads_back(tmp_path: Path) -> None:
    overrides = ["optimizer.lr=3e-5", "data.train=[0.5,a b,0.5,c]", "run.name='true'", "parallel.sequence=true"]
    overrides.append("profile.steps=[3,4]")
    cfg = load_config("quickstart", overrides)
    assert load_config(_config(tmp_path, dump_yaml(cfg))) == cfg
    assert from_dict(to_dict(cfg)) == cfg


def test_from_dict_refuses_wrong_types() -> None:
    assert from_dict({"train": {"steps": 3}}).train.steps == 3
    with pytest.raises(UserError, match=r"manifest: train.steps"):
        from_dict({"train": {"steps": 3.0}}, origin="manifest")
    with pytest.raises(UserError, match=r"parallel.sequence"):
        from_dict({"parallel": {"sequence": 1}})
    with pytest.raises(UserError, match=r"manifest: train.cuda_graph: got 'auto'; allowed: true or false"):
        from_dict({"train": {"cuda_graph": "auto"}}, origin="manifest")  # what was loaded holds what was chosen


def test_architecture_ignores_what_changes_no_weight() -> None:
    model = ModelConfig()
    same = replace(model, name="other", init_std=0.5, gate_table_init_std=2.0, hidden_dropout=0.1)
    same = replace(same, attention_dropout=0.1, max_position_embeddings=7)
    assert architecture(same) == architecture(model)


@pytest.mark.parametrize(
    "change",
    [
        {"kv_lora_rank": 128},
        {"kv_emb_dim": 128},
        {"gate": "add"},
        {"gate_norm": False},
        {"gate_norm_eps": 1e-3},
        {"rope_theta": 5e5},
        {"tie_word_embeddings": False},
        {"vocab_size": 50257},
        {"rms_norm_eps": 1e-5},
        {"q_lora_rank": 8},
    ],
)
def test_architecture_sees_what_changes_the_function(change: dict[str, object]) -> None:
    changed = replace(ModelConfig(), **change)  # type: ignore[arg-type]
    lines = architecture_difference(architecture(ModelConfig()), architecture(changed))
    key, value = next(iter(change.items()))
    assert lines[0] == f"model.{key}: checkpoint {getattr(ModelConfig(), key)}, configuration {value}"


def test_architecture_of_mha_knows_no_latent() -> None:
    mha = ModelConfig(attention="mha", gate="none", kv_emb_dim=0)
    assert architecture(replace(mha, kv_lora_rank=3)) == architecture(mha)
    assert architecture(replace(mha, max_position_embeddings=3)) != architecture(mha)
    lines = architecture_difference(architecture(ModelConfig()), architecture(mha))
    assert "model.attention: checkpoint mla, configuration mha" in lines
    assert "model.kv_lora_rank: checkpoint 64, configuration (not used)" in lines
