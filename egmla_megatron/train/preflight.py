"""Everything that can be checked before torch is imported and any process group starts."""

from __future__ import annotations

from pathlib import Path

from egmla_megatron.checkpoint.choose import check_compatible, choose_checkpoint
from egmla_megatron.checkpoint.manifest import read_manifest
from egmla_megatron.config.check import Layout, check_config
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.data.blend import check_blends, parse_blend, resolve_eod
from egmla_megatron.data.documents import check_document_options
from egmla_megatron.data.tokenizer import load_tokenizer
from egmla_megatron.data.validation import validation_samples
from egmla_megatron.data.verify import verify_prefix
from egmla_megatron.environment import whole_number
from egmla_megatron.errors import UserError
from egmla_megatron.folders import refuse_name, refuse_unwritable
from egmla_megatron.train.machine import check_machine
from egmla_megatron.train.resume import check_same_order
from egmla_megatron.train.run_dir import check_run_dir

__all__ = ["check_everything"]


def check_everything(cfg: RunConfig, world_size: int) -> tuple[Layout, Path | None]:
    """Configuration, run folder, data and checkpoint, before any process group starts.

    Returns:
        The layout, and the checkpoint to start from.

    Raises:
        UserError: names the first thing that would not work.
    """
    layout = check_config(cfg, world_size)
    refuse_name("run.dir", cfg.run.dir)
    check_run_dir(cfg)
    check_blends(cfg)
    check_document_options(cfg)
    if whole_number("LOCAL_RANK", 0, 0) == 0:
        _check_node(cfg, layout)
    checkpoint = choose_checkpoint(cfg)
    if checkpoint is not None:
        manifest = read_manifest(checkpoint)
        check_compatible(cfg, checkpoint, manifest, None)
        check_same_order(cfg, checkpoint, manifest)
    return layout, checkpoint


def _check_node(cfg: RunConfig, layout: Layout) -> None:
    """What every rank of a node would find alike, so one of them looks."""
    check_machine(cfg)
    refuse_unwritable("run.dir", cfg.run.dir)
    if cfg.data.cache_dir:
        refuse_name("data.cache_dir", cfg.data.cache_dir)
        refuse_unwritable("data.cache_dir", cfg.data.cache_dir)
    _check_data(cfg, layout)
    _check_tokenizer(cfg)


def _check_data(cfg: RunConfig, layout: Layout) -> None:
    """Headers, sizes and ids of every dataset, as far as is cheap."""
    if not cfg.data.train:
        raise UserError(
            "data.train: got nothing, give prefixes of indexed datasets (data.train=[data/mine] for data/mine.bin and "
            ".idx); tools/preprocess_data.py makes them from text or token files"
        )
    tokens = {"data.train": 0, "data.valid": 0}
    for key, entries in (("data.train", cfg.data.train), ("data.valid", cfg.data.valid)):
        for prefix in parse_blend(entries, key)[0]:
            tokens[key] += verify_prefix(prefix, vocab_size=cfg.model.vocab_size).tokens
    if cfg.data.valid:
        validation_samples(cfg, layout, tokens["data.valid"] // cfg.train.seq_length)  # at most; refuses too few
    eod = resolve_eod(cfg)
    if eod >= cfg.model.vocab_size:
        raise UserError(f"data.eod_id: got {eod}, allowed 0..{cfg.model.vocab_size - 1} (model.vocab_size)")


def _check_tokenizer(cfg: RunConfig) -> None:
    """The tokenizer that the export will carry: it loads, ends documents and fits the vocabulary."""
    source = cfg.data.tokenizer
    if not source:
        return
    if not Path(source).exists():
        raise UserError(
            f"data.tokenizer: got {source!r}, which is not there; give a folder with Hugging Face tokenizer files or a "
            "sentencepiece .model file, or leave it empty (data.tokenizer=)"
        )
    try:
        tokenizer = load_tokenizer(source)
    except UserError as error:
        raise UserError(f"data.{error}") from error
    except Exception as error:  # `tokenizers` raises bare Exceptions for broken files
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"data.tokenizer: {source} does not load ({type(error).__name__}: {reason}); copy it again, or leave it "
            "empty (data.tokenizer=)"
        ) from error
    if tokenizer.vocab_size > cfg.model.vocab_size:
        raise UserError(
            f"data.tokenizer: got {source} with {tokenizer.vocab_size} ids, allowed at most model.vocab_size = "
            f"{cfg.model.vocab_size}; use the tokenizer of the data, or enlarge model.vocab_size"
        )
