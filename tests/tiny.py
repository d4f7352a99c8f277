"""Models, runs and data small enough for a test, shared by the unit and the distributed tests.

Nothing here imports torch at the top: a test that starts subprocesses pays for it only there.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from egmla_megatron.config.schema import (
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    RunSection,
    TrainConfig,
)
from egmla_megatron.parallel.parity.cases import MHA, PLAIN, TINY

__all__ = [
    "GATES",
    "MHA",
    "PLAIN",
    "TINY",
    "gate_variants",
    "random_batches",
    "random_documents",
    "tiny_model",
    "tiny_run",
    "write_dataset",
    "write_run",
    "write_tokenizer",
]

# a newcomer's gate is tested like the others; test_gates.py holds this to GATES of attention/gated_kv_up.py
GATES = tuple(gate for gate in get_args(get_type_hints(ModelConfig)["gate"]) if gate != "none")


def tiny_model(**changes: Any) -> ModelConfig:
    """TINY with changes."""
    return replace(TINY, **changes)


def gate_variants(model: ModelConfig) -> dict[str, ModelConfig]:
    """`model` with every gate, named by it, with and without the norm behind it."""
    found = {}
    for gate in GATES:
        changes: dict[str, Any] = {"gate": gate}
        found[gate] = replace(model, **changes, gate_norm=True)
        found[f"{gate}_without_norm"] = replace(model, **changes, gate_norm=False)
    return found


def tiny_run(model: ModelConfig = TINY, folder: str = "runs/tiny", **sections: Any) -> RunConfig:
    """A fp32 run of `model` on one rank: 4 sequences of 16 tokens a step, silent; `section={key: value}` changes it."""
    base = RunConfig(
        run=RunSection(name="tiny", dir=folder, seed=7),
        model=model,
        data=DataConfig(num_workers=0),
        train=TrainConfig(
            seq_length=16, micro_batch_size=2, global_batch_size=4, steps=6, precision="fp32", eval_interval=0
        ),
        optimizer=OptimizerConfig(lr=1e-2, warmup_steps=2, distributed=False),
        parallel=ParallelConfig(implementation="torch"),
        logging=LoggingConfig(tensorboard=False, wandb="disabled"),
    )
    return replace(base, **{name: replace(getattr(base, name), **changes) for name, changes in sections.items()})


def random_documents(count: int, vocab_size: int, seed: int = 0) -> Iterable[list[int]]:
    """Documents of random length and ids; id 0 ends each."""
    draw = random.Random(seed)
    for _ in range(count):
        yield [draw.randrange(1, vocab_size) for _ in range(draw.randrange(5, 60))] + [0]


def write_dataset(prefix: Path, count: int = 80, vocab_size: int = TINY.vocab_size, seed: int = 0) -> str:
    """A data set with its manifest; returns the prefix."""
    from egmla_megatron.data.indexed import write_tokens

    documents = random_documents(count, vocab_size, seed)
    write_tokens(
        prefix,
        documents,
        vocab_size=vocab_size,
        eod_id=0,
        tokenizer="none",
        tokenizer_sha256="",
        source="random ids of a test",
    )
    return str(prefix)


def write_run(folder: Path, name: str, model: ModelConfig = TINY, **sections: Any) -> tuple[Path, Path]:
    """FOLDER/NAME.yaml of a tiny run on data in FOLDER/data (made when missing); returns (it, its run folder)."""
    from egmla_megatron.config.load import dump_yaml

    prefixes = {}
    for seed, split in enumerate(("train", "valid")):
        prefix = folder / "data" / split
        prefixes[split] = (str(prefix),)
        if not prefix.with_suffix(".bin").exists():
            write_dataset(prefix, 20, seed=seed)  # about 40 samples: a test of 12 steps reads them more than once
    data = {"num_workers": 0, **prefixes, **sections.pop("data", {})}
    train = {"steps": 12, **sections.pop("train", {})}
    run = folder / name
    cfg = tiny_run(model, str(run), data=data, train=train, **sections)
    path = folder / f"{name}.yaml"
    path.write_text(dump_yaml(cfg))
    return path, run


def random_batches(cfg: RunConfig, seed: int = 5) -> Iterator[Any]:
    """Endless micro-batches of random tokens for one rank."""
    import torch

    from egmla_megatron.data.batch import Batch

    generator = torch.Generator().manual_seed(seed)
    rows, length = cfg.train.micro_batch_size, cfg.train.seq_length
    while True:
        ids = torch.randint(cfg.model.vocab_size, (rows, length + 1), generator=generator)
        positions = torch.arange(length).expand(rows, -1)
        yield Batch(ids[:, :-1], ids[:, 1:], torch.ones(rows, length), positions)


def write_tokenizer(path: Path, eos_id: int) -> None:
    """A sentencepiece model of 300 pieces."""
    import io

    import sentencepiece

    text = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(Path(json.__file__).read_text().splitlines()),
        model_writer=text,
        vocab_size=300,
        eos_id=eos_id,
        minloglevel=2,
    )
    path.write_bytes(text.getvalue())
