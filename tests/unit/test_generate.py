"""Generation from an exported folder: prompts, batches, order on the terminal, what it took; the command itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from egmla_megatron.convert.to_hf import export_hf
from egmla_megatron.data.train_tokenizer import train_sentencepiece
from egmla_megatron.errors import UserError
from egmla_megatron.inference.generate import Sampling, Usage, _encoded, generate, load_exported
from egmla_megatron.inference.prompts import read_prompts
from egmla_megatron.inference.stream import OrderedStream
from tests.unit.test_to_hf import MHA, MODEL, weights_of

PROMPTS = ["def f(x):\n", "import json", "class A:"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("generate")
    text = Path(json.__file__).read_text(encoding="utf-8")
    tokenizer = train_sentencepiece([text], root / "t.model", vocab_size=600)
    export_hf(weights_of(MHA), MHA, root / "mha", tokenizer=tokenizer)
    return export_hf(weights_of(MODEL), MODEL, root / "a b", tokenizer=tokenizer)


def test_batches_stream_in_order_and_are_counted(folder: Path) -> None:
    model, tokenizer = load_exported(folder, device="cpu")
    sampling, shown, usage = Sampling(max_new_tokens=6, temperature=0.0), [], Usage()
    texts = generate(model, tokenizer, PROMPTS, sampling, batch_size=2, write=shown.append, usage=usage)
    assert texts == generate(model, tokenizer, PROMPTS, sampling)
    rule = "-" * 40
    first, second, third = (prompt + rows[0] for prompt, rows in zip(PROMPTS, texts, strict=True))
    assert "".join(shown) == f"{first}\n{rule}\n{second}\n{third}\n"
    assert (usage.sequences, usage.batches) == (3, [2, 1])
    assert 3 <= usage.new_tokens <= 18 and usage.seconds > 0
    elements = MODEL.num_layers * (MODEL.kv_lora_rank + MODEL.qk_rope_head_dim)
    assert usage.cache_bytes == usage.cache_tokens * elements * 4
    assert f"{elements * 4} bytes per token" in str(usage)


def test_seeds_and_classes_of_transformers(folder: Path) -> None:
    model, tokenizer = load_exported(folder.parent / "mha", device="cpu")
    usage = Usage()
    runs = [
        generate(model, tokenizer, PROMPTS, Sampling(max_new_tokens=8, seed=seed), num_samples=2, usage=usage)
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]
    assert usage.cache_bytes == usage.cache_tokens * 2 * MHA.num_layers * MHA.hidden_size * 4


def test_a_prompt_of_which_nothing_is_left_is_an_empty_one() -> None:
    class Stripping:
        eos_token_id = 3

        def encode(self, text: str, **options: Any) -> list[int]:
            return [len(word) for word in text.split()]

    assert [_encoded(Stripping(), text) for text in ("", " \n", " ab c")] == [[3], [3], [2, 1]]
    nothing: Any = None  # looked at later than the prompts
    for broken in (os.fsdecode(b"caf\xe9"), json.loads('"\\ud800"')):
        with pytest.raises(UserError, match=r"prompt: got '.*\\ud[c8]\w+', allowed text in UTF-8"):
            generate(nothing, nothing, ["fine", broken], Sampling())


def test_prompts_of_files(tmp_path: Path) -> None:
    plain, lines = tmp_path / "p.txt", tmp_path / "p.jsonl"
    plain.write_bytes(b"one\r\n\n  two\n")
    lines.write_text('"a\\nb"\n{"prompt": "c", "other": 1}\n')
    assert read_prompts(plain) == ["one", "  two"]
    assert read_prompts(lines) == ["a\nb", "c"]
    lines.write_text('"a"\n{"text": "c"}\n')
    with pytest.raises(UserError, match=r"p\.jsonl line 2: got"):
        read_prompts(lines)
    plain.write_text("\n")
    with pytest.raises(UserError, match="holds no prompt"):
        read_prompts(plain)
    plain.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot be read"):
        read_prompts(plain)


class Letters:
    """Token ids as code points; 9 is half a character."""

    def decode(self, ids: Any, **options: Any) -> str:
        return "".join("\ufffd" if token == 9 else chr(token) for token in ids.tolist() if token)


def test_the_first_unfinished_sequence_is_the_one_that_grows() -> None:
    shown: list[str] = []
    tokenizer: Any = Letters()
    stream = OrderedStream(tokenizer, ["A>", "B>"], {0}, shown.append)
    stream.put(torch.tensor([[1, 2], [3, 4]]))
    assert "".join(shown) == "A>"
    stream.put(torch.tensor([97, 120]))
    stream.put(torch.tensor([9, 121]))
    assert "".join(shown) == "A>a"  # half a character waits
    stream.put(torch.tensor([0, 122]))
    stream.put(torch.tensor([0, 33]))
    rule = "\n" + "-" * 40 + "\n"
    assert "".join(shown) == f"A>a\ufffd{rule}B>xyz!"
    stream.end()
    assert "".join(shown) == f"A>a\ufffd{rule}B>xyz!\n"


def test_the_command_without_a_network(folder: Path, root: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "p.txt"
    prompts.write_text("import json\nclass A:\n")
    options = ["--prompts-file", str(prompts), "--max-new-tokens", "5", "--precompute-gates", "host", "--json"]
    command = [sys.executable, str(root / "tools" / "generate.py"), str(folder), *options]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200, check=False)
    assert result.returncode == 0, result.stderr
    texts = json.loads(result.stdout)
    assert [len(rows) for rows in texts] == [1, 1]
    size = MODEL.num_layers * MODEL.vocab_size * 2 * (5 + 3) * 4
    assert f"precomputed gates: {size:,} bytes (host)" in result.stderr
    assert "tokens/s; cache" in result.stderr
