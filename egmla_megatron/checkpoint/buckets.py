"""Mends the optimizer states that megatron-core 0.19.2 saves from a wrong place.

The distributed optimizer gathers its states into one tensor per gradient buffer *without* the padding between
buckets, then cuts each parameter out at its offset *with* that padding. From the second bucket on, moments and main
weights of the checkpoint are shifted, silently. There are several buckets when the word embedding is tied over
pipeline stages (it has a bucket of its own), and when `parallel.overlap_grad_reduce` is on.
"""

from __future__ import annotations

from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

__all__ = ["mend_padded_buckets"]


def mend_padded_buckets(optimizer: Any, state: dict[Any, Any]) -> None:
    """Put the right data into a `fully_reshardable` state that is about to be saved, in place. Every rank calls it."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    for index, each in enumerate(chained):
        if isinstance(each, DistributedOptimizer) and any(_padding_before(buffer)[-1] for buffer in each.buffers):
            _rewrite(each, (state if len(chained) == 1 else state[index])["param_state"])


def _padding_before(buffer: Any) -> list[int]:
    """Elements of padding in front of each bucket of a gradient buffer."""
    padding, unpadded = [], 0
    for bucket in buffer.buckets:
        padding.append(bucket.offset - unpadded)
        unpadded += bucket.numel_unpadded
    return padding


def _rewrite(optimizer: DistributedOptimizer, param_state: dict[int, dict[str, Any]]) -> None:
    """Cut every parameter out once more; numbered as megatron-core does, buffer by buffer."""
    gathered = optimizer.get_parameter_state_dp_zero(use_gloo_comm=False, return_on_all_ranks=True)
    number = 0
    for index, buffer in enumerate(optimizer.buffers):
        (whole,) = gathered[index].values()  # one dtype
        padding = _padding_before(buffer)
        for start, end, bucket in buffer.param_index_map.values():
            for key, sharded in param_state[number].items():
                part = whole[key][start - padding[bucket] : end - padding[bucket]]
                sharded.data = part.reshape(sharded.data.shape)
            number += 1
