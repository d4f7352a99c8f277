"""Text of a batch on the terminal while it is generated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["OrderedStream"]

_RULE = "-" * 40  # between sequences
_UNFINISHED = "\ufffd"  # what bytes decode to that are no whole character yet


class OrderedStream:
    """A streamer for `generate` of transformers: sequences appear whole and in order.

    The first sequence that has not ended is written as it grows; those behind it are kept until it is their turn.

    titles: written before each sequence. write: takes text.
    """

    def __init__(self, tokenizer: Any, titles: list[str], ends: set[int], write: Callable[[str], None]):
        self.tokenizer, self.titles, self.ends, self.write = tokenizer, titles, ends, write
        self.ids: list[list[int]] = [[] for _ in titles]
        self.ended = [False] * len(titles)
        self.head = 0  # the sequence that is being written
        self.written = 0  # characters of it
        self.prompt_seen = False

    def put(self, value: Tensor) -> None:
        """The prompts first, then the next token of every sequence."""
        if not self.prompt_seen:
            self.prompt_seen = True
            self.write(self.titles[0])
            return
        for row, token in enumerate(value.flatten().tolist()):
            if not self.ended[row]:
                self.ids[row].append(token)
                self.ended[row] = token in self.ends
        self._advance()

    def end(self) -> None:
        """Called when no token follows."""
        self.ended = [True] * len(self.titles)
        self._advance()

    def _advance(self) -> None:
        while self.head < len(self.titles):
            text = self.text(self.head)
            done = self.ended[self.head]
            shown = text if done else text.rstrip(_UNFINISHED)
            self.write(shown[self.written :])
            self.written = max(self.written, len(shown))
            if not done:
                return
            self.head, self.written = self.head + 1, 0
            self.write(f"\n{_RULE}\n{self.titles[self.head]}" if self.head < len(self.titles) else "\n")

    def text(self, row: int) -> str:
        """What a sequence says so far, without special tokens."""
        ids = torch.tensor(self.ids[row], dtype=torch.long)
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
