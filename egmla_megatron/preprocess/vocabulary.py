"""Which ids are allowed, which one ends a document, and the tokenizer they belong to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from egmla_megatron.data.index_file import id_dtype
from egmla_megatron.data.tokenizer import GPT2, load_tokenizer
from egmla_megatron.errors import UserError
from egmla_megatron.preprocess.options import Options

__all__ = ["Vocabulary", "find_vocabulary"]

_GPT2_SIZE, _GPT2_EOS = 50_257, 50_256  # known without its files: token lists need no more


@dataclass(frozen=True)
class Vocabulary:
    """Ids are 0 to size - 1."""

    size: int
    eos_id: int
    tokenizer: str  # as it was named
    sha256: str  # of the tokenizer, "" when only token lists were read and its files were not needed
    text_encoder: Callable[[str], np.ndarray] | None = field(default=None, compare=False, repr=False)  # picklable

    @property
    def dtype(self) -> np.dtype:
        """Type of the ids on disk."""
        return id_dtype(self.size)

    @property
    def identity(self) -> str:
        """The tokenizer's contents where they are known, else its name: a copy elsewhere is the same tokenizer."""
        return self.sha256 or self.tokenizer


def find_vocabulary(options: Options, *, has_text: bool) -> Vocabulary:
    """Loads the tokenizer unless GPT-2's token lists are all there is.

    Raises:
        UserError: --vocab-size is smaller than the tokenizer, or the end-of-document id is not below it.
    """
    if options.tokenizer == GPT2 and not has_text:
        size, eos, sha256, text_encoder = options.vocab_size or _GPT2_SIZE, _GPT2_EOS, "", None
    else:
        tokenizer = load_tokenizer(options.tokenizer)
        size, eos, sha256, text_encoder = tokenizer.vocab_size, tokenizer.eod, tokenizer.sha256, tokenizer.encode_array
        if options.vocab_size is not None and options.vocab_size < size:
            raise UserError(
                f"--vocab-size: got {options.vocab_size}, allowed at least the {size} ids of the tokenizer "
                f"{options.tokenizer}; leave --vocab-size out"
            )
        size = options.vocab_size or size
    if options.eos_id is not None:
        eos = options.eos_id
    if not 0 <= eos < size:
        raise UserError(f"--eos-id: got {eos}, allowed 0 to {size - 1} (--vocab-size {size}); set one that fits")
    return Vocabulary(size, eos, options.tokenizer, sha256, text_encoder if has_text else None)
