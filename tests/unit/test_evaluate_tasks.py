"""tools/evaluate.py tasks: lm_eval on tasks made here, against log-likelihoods that the model itself gives."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from egmla_megatron.convert.from_hf import import_hf
from egmla_megatron.convert.to_hf import export_hf
from egmla_megatron.data.train_tokenizer import train_sentencepiece
from egmla_megatron.errors import UserError
from egmla_megatron.evaluate import tasks
from egmla_megatron.evaluate.tasks import TaskOptions, load_tasks, plan_tasks
from egmla_megatron.inference.generate import load_exported
from tests.hf_models import one_thread
from tests.unit.test_commands import call
from tests.unit.test_to_hf import MODEL, weights_of

__all__ = ["one_thread"]  # a fixture, used by every test of the file

needs_lm_eval = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("lm_eval", "accelerate", "peft")),
    reason="lm_eval is not installed (EGMLA_EXTRAS=dev,eval)",
)

LAST_WORDS = [("def f(x):\n    return", " x"), ("import json\nfrom", " typing"), ("class A", "(B):"), ("", "self")]
CHOICES = [
    ("Question: how?\nAnswer:", ["by hand", "not at all", "x = 1"], 2),
    ("Question: why?\nAnswer:", ["None", "return the value"], 0),
]
COMMON = """
output_type: {kind}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}, cache_dir: {cache}}}
test_split: test
metadata: {{version: 3.0}}
"""
LAST_WORD_TASK = """
task: tiny_last_word
doc_to_text: "{{context}}"
doc_to_target: "{{continuation}}"
metric_list:
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
CHOICE_TASK = """
task: tiny_choice
doc_to_text: "{{query}}"
doc_to_target: "{{gold}}"
doc_to_choice: "{{choices}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """hf (an export), checkpoint (the same weights), t.model, tasks."""
    root = tmp_path_factory.mktemp("desk")
    text = Path(json.__file__).read_text(encoding="utf-8")
    tokenizer = train_sentencepiece([text], root / "t.model", vocab_size=600)
    export_hf(weights_of(MODEL), MODEL, root / "hf", tokenizer=tokenizer, vocab_size=600)
    import_hf(root / "hf", root / "checkpoint", vocab_size=640, step=30)
    (root / "tasks").mkdir()
    last = [{"context": context, "continuation": word} for context, word in LAST_WORDS]
    choice = [{"query": query, "choices": choices, "gold": gold} for query, choices, gold in CHOICES]
    for name, kind, task, rows in (
        ("last", "loglikelihood", LAST_WORD_TASK, last),
        ("choice", "multiple_choice", CHOICE_TASK, choice),
    ):
        data = root / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (root / "tasks" / f"{name}.yaml").write_text(task + COMMON.format(kind=kind, rows=data, cache=root / "cache"))
    return root


@torch.no_grad()
def log_likelihood(model: Any, tokenizer: Any, context: str, continuation: str, *, bos: bool) -> tuple[float, bool]:
    """(nats, whether each token is the most likely one) of `continuation`, from one forward pass over all tokens."""
    before = tokenizer.encode(context, add_special_tokens=False)
    whole = tokenizer.encode(context + continuation, add_special_tokens=False)
    if bos or not before:
        before, whole = [tokenizer.bos_token_id, *before], [tokenizer.bos_token_id, *whole]
    logits_SV = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    targets = whole[len(before) :]
    rows = logits_SV[len(before) - 1 : -1]
    return float(rows[range(len(targets)), targets].sum()), rows.argmax(-1).tolist() == targets


@needs_lm_eval
def test_scores_are_those_of_the_model_itself(
    desk: Path, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = load_exported(desk / "hf", device="cpu")

    def evaluated(where: str, *options: str) -> tuple[dict[str, Any], str]:
        words = ["tasks", str(desk / where), "--tasks", "tiny_last_word,tiny_choice", "--device", "cpu"]
        words += ["--include-path", str(desk / "tasks"), "--json", str(desk / "out.json"), "--batch-size", "3"]
        code, out, err = call(str(root / "tools" / "evaluate.py"), [*words, *options], monkeypatch, capsys)
        assert code == 0, err
        return json.loads((desk / "out.json").read_text()), out

    def check(found: dict[str, Any], *, bos: bool) -> dict[str, float]:
        scores = {(score["task"], score["metric"]): score for score in found["scores"]}
        nats, greedy = zip(*(log_likelihood(model, tokenizer, *pair, bos=bos) for pair in LAST_WORDS), strict=True)
        perplexity, accuracy = scores["tiny_last_word", "perplexity"], scores["tiny_last_word", "acc"]
        assert perplexity["value"] == pytest.approx(math.exp(-sum(nats) / len(nats)), rel=1e-4)
        assert accuracy["value"] == sum(greedy) / len(greedy)
        right = 0
        for query, choices, gold in CHOICES:
            values = [log_likelihood(model, tokenizer, query, f" {choice}", bos=bos)[0] for choice in choices]
            right += values.index(max(values)) == gold
        assert scores["tiny_choice", "acc"]["value"] == right / len(CHOICES)
        assert perplexity["stderr"] > 0 and perplexity["higher_is_better"] is False
        assert (perplexity["samples"], perplexity["few_shot"], perplexity["version"]) == (4, 0, "3.0")
        assert found["bos_prepended"] is bos and found["empty_context_token"] == tokenizer.bos_token_id
        return {"perplexity": perplexity["value"]}

    plain, out = evaluated("hf")
    without = check(plain, bos=False)["perplexity"]
    assert (plain["checkpoint"], plain["step"], plain["hf_dir"]) == (None, None, str(desk / "hf"))
    assert "no BOS before the texts, float32 on cpu" in out
    assert f"| tiny_last_word | perplexity | {without:.4f} | " in out
    kept = desk / "kept"
    options = ("--bos", "yes", "--tokenizer", str(desk / "t.model"), "--hf-dir", str(kept))
    exported, out = evaluated("checkpoint", *options)
    assert check(exported, bos=True)["perplexity"] != pytest.approx(without, rel=1e-3)
    assert (exported["checkpoint"], exported["step"], exported["hf_dir"]) == (str(desk / "checkpoint"), 30, str(kept))
    assert out.startswith(f"{desk}/checkpoint, step 30; lm_eval {exported['versions']['lm_eval']}, BOS before")
    assert (kept / "config.json").is_file()
    limited, _ = evaluated("hf", "--limit", "1", "--num-fewshot", "0")
    assert {score["samples"] for score in limited["scores"]} == {1}


@needs_lm_eval
def test_tasks_that_cannot_be_loaded(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval import tasks as of_lm_eval

    own = TaskOptions(("tiny_chioce",), include_path=str(desk / "tasks"))
    scan = functools.partial(of_lm_eval.TaskManager, include_defaults=False)  # its own files take seconds to read
    monkeypatch.setattr(of_lm_eval, "TaskManager", lambda include_path, **_: scan(include_path=include_path))
    with pytest.raises(UserError, match=r"--tasks: got 'tiny_chioce', allowed names of lm_eval such as tiny_ch"):
        load_tasks(own)
    (desk / "tasks" / "broken.yaml").write_text(
        LAST_WORD_TASK.replace("tiny_last_word", "broken")
        + COMMON.format(kind="loglikelihood", rows="gone.jsonl", cache=desk / "cache")
    )
    with pytest.raises(UserError, match=r"broken cannot be loaded \(FileNotFoundError: .*; without a network"):
        load_tasks(replace(own, names=("broken",)))


def test_what_is_refused_before_anything_is_loaded(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf, checkpoint, tokenizer = str(desk / "hf"), str(desk / "checkpoint"), str(desk / "t.model")
    monkeypatch.setattr(tasks, "find_spec", lambda name: None if name == "lm_eval" else object())
    with pytest.raises(UserError, match=r"got no package lm_eval; install with: pip install 'lm-eval\[hf\]'"):
        plan_tasks(hf, TaskOptions(("x",)), 1)
    monkeypatch.setattr(tasks, "find_spec", lambda name: object())
    assert plan_tasks(hf, TaskOptions(("x",)), 1) is None
    assert plan_tasks(checkpoint, TaskOptions(("x",)), 1) == Path(checkpoint)  # it knows its tokenizer
    for where, changes, ranks, message in (
        (hf, {}, 8, "got 8 ranks"),
        (hf, {"limit": -1}, 1, "--limit: got -1"),
        (hf, {"num_fewshot": -1}, 1, "--num-fewshot: got -1"),
        (hf, {"batch_size": 0}, 1, "--batch-size: got 0"),
        (hf, {"include_path": "nowhere"}, 1, "--include-path: got nowhere"),
        (hf, {"hf_dir": "x"}, 1, "--hf-dir: .* is an export already"),
        (hf, {"tokenizer": tokenizer}, 1, "--tokenizer: .* is an export already"),
        (checkpoint, {"tokenizer": "gone"}, 1, "--tokenizer: got gone, allowed"),
        (str(desk / "tasks"), {}, 1, "no complete checkpoint"),
    ):
        with pytest.raises(UserError, match=message):
            plan_tasks(where, TaskOptions(("x",), **changes), ranks)
