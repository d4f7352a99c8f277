"""Rows -> documents as they are stored: ids checked, narrowed, ended by one end-of-document id, hashed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xxhash

from egmla_megatron.preprocess.rows import Ledger, TextRows, TokenRows
from egmla_megatron.preprocess.vocabulary import Vocabulary

__all__ = ["Documents", "Encoder"]


@dataclass(frozen=True)
class Documents:
    """D documents of T tokens in all."""

    tokens_T: np.ndarray  # the dtype on disk
    lengths_D: np.ndarray  # int64, at least 1
    hashes_D2: np.ndarray  # uint64 pairs: xxh3-128 of the ids as stored, without end-of-document ids at the end
    clusters_D: np.ndarray  # int64


class Encoder:
    """Encodes the rows of one worker; remembers which ids it saw."""

    def __init__(self, vocabulary: Vocabulary, append_eos: str) -> None:
        self.vocabulary, self.append_eos = vocabulary, append_eos
        self.seen_V = np.zeros(vocabulary.size, bool)

    def encode(self, rows: TokenRows | TextRows, ledger: Ledger) -> Documents:
        """Counts in the ledger what it drops and how documents end. UserError for ids that do not fit."""
        if isinstance(rows, TextRows):
            tokens_T, lengths_R = self._from_text(rows, ledger)
            clusters_R = rows.clusters_R
        else:
            tokens_T, lengths_R, clusters_R = self._from_ids(rows, ledger)
        tokens_T, lengths_R, bare_R = self._end_documents(tokens_T, lengths_R, ledger, isinstance(rows, TextRows))
        keep_R = lengths_R > 0
        if not keep_R.all():
            lengths_R, bare_R, clusters_R = lengths_R[keep_R], bare_R[keep_R], clusters_R[keep_R]
        self._remember(tokens_T)
        ledger.counts["documents"] += len(lengths_R)
        ledger.counts["tokens"] += len(tokens_T)
        return Documents(tokens_T, lengths_R, _hashes(tokens_T, lengths_R, bare_R), clusters_R)

    def _remember(self, tokens_T: np.ndarray) -> None:
        """Marks the ids as seen: few are new, so that looking is cheaper than counting or writing all of them."""
        ids_T = tokens_T.astype(np.intp)
        seen_T = self.seen_V.take(ids_T, mode="clip")  # ids are in range; "raise" would look once more
        self.seen_V[ids_T[~seen_T]] = True

    def _from_text(self, rows: TextRows, ledger: Ledger) -> tuple[np.ndarray, np.ndarray]:
        dtype, encode = self.vocabulary.dtype, self.vocabulary.text_encoder
        assert encode is not None, "text rows need a tokenizer"
        pieces = [encode(text) for text in rows.texts]
        lengths_R = np.fromiter(map(len, pieces), np.int64, len(pieces))
        tokens_T = np.concatenate(pieces).astype(dtype) if pieces else np.empty(0, dtype)
        return tokens_T, lengths_R

    def _from_ids(self, rows: TokenRows, ledger: Ledger) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids that fit, in the dtype on disk; a row with one that does not is a fault."""
        values_T, lengths_R, clusters_R = rows.values_T, rows.lengths_R, rows.clusters_R
        unsigned_T = values_T.view(f"u{values_T.dtype.itemsize}")  # negative ids become the largest of all
        if len(unsigned_T) and int(unsigned_T.max()) >= self.vocabulary.size:
            bad_T = unsigned_T >= self.vocabulary.size
            ends_R = np.cumsum(lengths_R)
            positions = np.flatnonzero(bad_T)
            bad_R, first = np.unique(np.searchsorted(ends_R, positions, side="right"), return_index=True)
            for row, position in zip(bad_R.tolist(), positions[first].tolist(), strict=True):
                within = position - int(ends_R[row] - lengths_R[row])
                ledger.fault(rows.place(row), self._range_problem(int(values_T[position]), within))
            keep_R = np.ones(len(lengths_R), bool)
            keep_R[bad_R] = False
            values_T = values_T[np.repeat(keep_R, lengths_R)]
            lengths_R, clusters_R = lengths_R[keep_R], clusters_R[keep_R]
        return values_T.astype(self.vocabulary.dtype), lengths_R, clusters_R

    def _range_problem(self, value: int, within: int) -> str:
        size = self.vocabulary.size
        return (
            f"id {value} at token {within}, allowed 0 to {size - 1} ({self.vocabulary.tokenizer}, "
            f"--vocab-size {size}): other tokenizer or damage"
        )

    def _end_documents(
        self, tokens_T: np.ndarray, lengths_R: np.ndarray, ledger: Ledger, text: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens, lengths, lengths without end-of-document ids at the end); rows without an id get length 0."""
        eos = self.vocabulary.eos_id
        bare_R = _without_trailing(tokens_T, lengths_R, eos)
        empty = int(np.count_nonzero(bare_R == 0))
        ended = int(np.count_nonzero((bare_R < lengths_R) & (bare_R > 0)))
        inner = int(np.count_nonzero(tokens_T == eos) - (lengths_R - bare_R).sum())
        ledger.counts.update(empty=empty, inner_eos=inner)
        if not text:
            ledger.counts.update(with_eos=ended, without_eos=len(lengths_R) - ended - empty)
        extra = 0 if self.append_eos == "never" else 1
        base_R = bare_R if self.append_eos == "auto" else lengths_R
        wanted_R = np.where(bare_R > 0, base_R + extra, 0)
        if self.append_eos != "always" and np.array_equal(wanted_R, lengths_R):
            return tokens_T, lengths_R, bare_R
        kept_R = np.where(bare_R > 0, base_R, 0)
        return _refit(tokens_T, lengths_R, kept_R, wanted_R, eos), wanted_R, bare_R


def _without_trailing(tokens_T: np.ndarray, lengths_R: np.ndarray, eos: int) -> np.ndarray:
    """Length of each row without the end-of-document ids at its end."""
    starts_R = np.cumsum(lengths_R) - lengths_R
    bare_R = lengths_R.copy()
    active = np.flatnonzero(bare_R > 0)
    while len(active):
        active = active[tokens_T[starts_R[active] + bare_R[active] - 1] == eos]
        bare_R[active] -= 1
        active = active[bare_R[active] > 0]
    return bare_R


def _refit(
    tokens_T: np.ndarray, lengths_R: np.ndarray, kept_R: np.ndarray, wanted_R: np.ndarray, eos: int
) -> np.ndarray:
    """The first kept_R[r] tokens of every row, and `eos` behind them where wanted_R[r] is one more.

    Copies row by row: rows are hundreds of tokens long, and a copy costs less than masks over all tokens.
    """
    itemsize = tokens_T.dtype.itemsize
    targets_R = np.cumsum(wanted_R) - wanted_R
    out_T = np.empty(int(wanted_R.sum()), tokens_T.dtype)
    source, target = memoryview(tokens_T).cast("B"), memoryview(out_T).cast("B")
    columns = ((np.cumsum(lengths_R) - lengths_R) * itemsize, targets_R * itemsize, kept_R * itemsize)
    for start, goal, size in zip(*(column.tolist() for column in columns), strict=True):
        target[goal : goal + size] = source[start : start + size]
    out_T[(targets_R + kept_R)[wanted_R > kept_R]] = eos
    return out_T


def _hashes(tokens_T: np.ndarray, lengths_D: np.ndarray, bare_D: np.ndarray) -> np.ndarray:
    """xxh3-128 of every document's ids; what ends it does not count, so that every form of a text hashes the same."""
    raw, itemsize = memoryview(tokens_T).cast("B"), tokens_T.dtype.itemsize
    starts_D = (np.cumsum(lengths_D) - lengths_D) * itemsize
    spans = zip(starts_D.tolist(), (starts_D + bare_D * itemsize).tolist(), strict=True)
    digest = xxhash.xxh3_128_digest
    return np.frombuffer(b"".join([digest(raw[a:b]) for a, b in spans]), ">u8").reshape(-1, 2).astype(np.uint64)
