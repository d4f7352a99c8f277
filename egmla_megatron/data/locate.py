"""Where in the files a token of a sample comes from."""

from __future__ import annotations

from typing import Any

__all__ = ["locate_token"]


def locate_token(dataset: Any, sample: int, position: int) -> str:
    """File, document and position in it of token `position` of a sample that was read before.

    dataset: megatron-core's GPTDataset or a BlendedDataset of such; others are named by sample and position only.
    """
    if hasattr(dataset, "dataset_sample_index"):  # a blend
        part = int(dataset.dataset_index[sample])
        return locate_token(dataset.datasets[part], int(dataset.dataset_sample_index[sample]), position)
    if not hasattr(dataset, "document_index"):
        return f"sample {sample}, position {position}"
    shuffled = dataset.shuffle_index[sample]
    entry, offset = map(int, dataset.sample_index[shuffled])
    left = offset + position
    while left >= (length := int(dataset.dataset.sequence_lengths[dataset.document_index[entry]])):
        left -= length
        entry += 1
    return f"{dataset.dataset.path_prefix}, document {int(dataset.document_index[entry])}, position {left}"
