"""Bytes and FLOPs that a kernel cannot do without, and how long a machine needs for them at least.

Bytes: every input is read once and every output is written once, whatever an implementation does beyond that. Inputs
of a backward pass are the gradients and those inputs of the forward pass that its formula needs; attention also reads
its output, since the scores, which nobody could store, are computed again. Left out are statistics (one or two
numbers of a row or head), scalars and temporary memory.

FLOPs: those of matrix products, a multiply-add counted as two; of attention the causal half, each query with the keys
up to its own. Elementwise arithmetic does not run on tensor cores and is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from egmla_megatron.bench.roofline.sizes import Linear, Sizes

__all__ = [
    "Cost",
    "Machine",
    "add",
    "attention_backward",
    "attention_forward",
    "cross_entropy_backward",
    "cross_entropy_forward",
    "gate_backward",
    "gate_forward",
    "gate_heads_backward",
    "gate_heads_forward",
    "latent_norm_backward",
    "latent_norm_forward",
    "linear_input_gradient",
    "linear_output",
    "linear_weight_gradient",
    "norm_backward",
    "norm_forward",
    "row_update",
    "split_heads",
    "swiglu_backward",
    "swiglu_forward",
    "update",
    "weight_update_bytes",
]

_INT64, _FP32 = 8, 4  # bytes


@dataclass(frozen=True)
class Cost:
    """Of one call of a kernel."""

    bytes: int
    flops: int = 0


@dataclass(frozen=True)
class Machine:
    """What was measured of the machine that kernels are compared with."""

    bytes_per_s: float  # of a large copy on the device, read and written
    flops_per_s: float  # of large matrix products in the model's type

    def memory_s(self, cost: Cost) -> float:
        """Seconds that memory needs."""
        return cost.bytes / self.bytes_per_s

    def matrix_s(self, cost: Cost) -> float:
        """Seconds that matrix products need."""
        return cost.flops / self.flops_per_s

    def bound_s(self, cost: Cost) -> float:
        """Seconds that the kernel needs at least, as far as a copy and a product are the best that can be."""
        return max(self.memory_s(cost), self.matrix_s(cost))


def linear_output(linear: Linear, sizes: Sizes) -> Cost:
    """x W^T."""
    elements = linear.rows * (linear.inputs + linear.outputs) + linear.inputs * linear.outputs
    return Cost(sizes.element_bytes * elements, _linear_flops(linear))


def linear_input_gradient(linear: Linear, sizes: Sizes) -> Cost:
    """dy W, as many elements as x W^T; added to the gradient of another reader of x, which is then read and written."""
    plain = linear_output(linear, sizes)
    others = linear.rows * linear.inputs if linear.beside else 0
    return Cost(plain.bytes + sizes.element_bytes * others, plain.flops)


def linear_weight_gradient(linear: Linear, sizes: Sizes) -> Cost:
    """dy^T x, written, or added to the main gradient, which is then read and written."""
    weight = linear.inputs * linear.outputs
    if linear.in_layer and sizes.gradients_in_layers:
        out = 2 * weight * sizes.gradient_bytes
    else:
        out = weight * sizes.element_bytes
    return Cost(sizes.element_bytes * linear.rows * (linear.inputs + linear.outputs) + out, _linear_flops(linear))


def _linear_flops(linear: Linear) -> int:
    return 2 * linear.rows * linear.inputs * linear.outputs


def attention_forward(sizes: Sizes) -> Cost:
    """q, k, v -> output; a product with the keys and one with the values."""
    elements = sizes.tokens * 2 * (sizes.key_width + sizes.value_width)
    return Cost(sizes.element_bytes * elements, 2 * _pairs(sizes) * (sizes.key_width + sizes.value_width))


def attention_backward(sizes: Sizes) -> Cost:
    """q, k, v, output and its gradient -> gradients of q, k, v.

    Products: the scores again, their gradient, and those of q, k and v.
    """
    elements = sizes.tokens * 4 * (sizes.key_width + sizes.value_width)
    return Cost(sizes.element_bytes * elements, 2 * _pairs(sizes) * (3 * sizes.key_width + 2 * sizes.value_width))


def _pairs(sizes: Sizes) -> int:
    """Of a query and a key that it sees, over all sequences."""
    return sizes.sequences * sizes.length * (sizes.length + 1) // 2


def norm_forward(tokens: int, columns: int, sizes: Sizes) -> Cost:
    """RMSNorm: x and the weight -> x normed."""
    return Cost(sizes.element_bytes * (2 * tokens * columns + columns))


def norm_backward(tokens: int, columns: int, sizes: Sizes) -> Cost:
    """RMSNorm: x, the weight, a gradient -> gradients of both."""
    return Cost(sizes.element_bytes * (3 * tokens * columns + 2 * columns))


def latent_norm_forward(sizes: Sizes) -> Cost:
    """RMSNorm: latent with the RoPE key, the weight -> latent normed, the key."""
    latent = sizes.model.kv_lora_rank
    return Cost(sizes.element_bytes * (2 * sizes.tokens * (latent + sizes.heads.rope) + latent))


def latent_norm_backward(sizes: Sizes) -> Cost:
    """RMSNorm: latent, the weight, gradients of both outputs -> gradients of what both came in and of the weight."""
    latent = sizes.model.kv_lora_rank
    return Cost(sizes.element_bytes * (sizes.tokens * (3 * latent + 2 * sizes.heads.rope) + 2 * latent))


def add(tokens: int, columns: int, sizes: Sizes) -> Cost:
    """Two tensors -> their sum."""
    return Cost(sizes.element_bytes * 3 * tokens * columns)


def swiglu_forward(sizes: Sizes) -> Cost:
    """Gate and up -> their product."""
    return Cost(sizes.element_bytes * sizes.tokens * 3 * sizes.model.intermediate_size)


def swiglu_backward(sizes: Sizes) -> Cost:
    """Gate, up and a gradient -> gradients of both."""
    return Cost(sizes.element_bytes * sizes.tokens * 5 * sizes.model.intermediate_size)


def cross_entropy_forward(sizes: Sizes) -> Cost:
    """Logits and labels -> losses in fp32."""
    logits = sizes.element_bytes * sizes.tokens * sizes.model.vocab_size
    return Cost(logits + sizes.tokens * (_INT64 + _FP32))


def cross_entropy_backward(sizes: Sizes) -> Cost:
    """Logits, labels and the losses' gradients -> the logits' gradients."""
    logits = sizes.element_bytes * sizes.tokens * sizes.model.vocab_size
    return Cost(2 * logits + sizes.tokens * (_INT64 + _FP32))


def gate_forward(sizes: Sizes) -> Cost:
    """Latents, gates of the rows, each token's row, weight and bias -> gated and normed latents."""
    weights = 2 if sizes.model.gate_norm else 0
    elements = (2 * sizes.tokens + sizes.rows + weights) * sizes.kv_width
    return Cost(sizes.element_bytes * elements + _INT64 * sizes.tokens)


def gate_backward(sizes: Sizes) -> Cost:
    """A gradient, latents, gates, the row map and the weight -> gradients of latents, gates, weight and bias."""
    weights = 3 if sizes.model.gate_norm else 0
    elements = (3 * sizes.tokens + 2 * sizes.rows + weights) * sizes.kv_width
    return Cost(sizes.element_bytes * elements + _INT64 * (2 * sizes.tokens + sizes.rows + 1))


def gate_heads_forward(sizes: Sizes) -> Cost:
    """What `gate_forward` and `split_heads` read, once -> queries, keys, values."""
    both = gate_forward(sizes).bytes + split_heads(sizes).bytes
    return Cost(both - 2 * sizes.element_bytes * sizes.tokens * sizes.kv_width)


def gate_heads_backward(sizes: Sizes) -> Cost:
    """The same the other way round."""
    both = gate_backward(sizes).bytes + split_heads(sizes).bytes
    return Cost(both - 2 * sizes.element_bytes * sizes.tokens * sizes.kv_width)


def split_heads(sizes: Sizes) -> Cost:
    """Queries, expanded latents and the shared RoPE key -> queries, keys, values; with every position's angles.

    Backward has the same sizes the other way round.
    """
    columns = 3 * sizes.key_width + sizes.kv_width + sizes.value_width + sizes.heads.rope
    return Cost(sizes.element_bytes * sizes.tokens * columns + _FP32 * sizes.length * (sizes.heads.rope // 2))


def weight_update_bytes(weight_bytes: int, *, halves: bool) -> int:
    """Of a weight and its master weight, read and written by an update.

    Args:
        weight_bytes: of a weight in the model; 0: the master weight is it.
        halves: the master weight's upper half is the weight, a bf16 one.
    """
    return 2 * (weight_bytes + 2) if halves else 2 * _FP32 + weight_bytes


def update(parameters: int, weights: int) -> Cost:
    """AdamW in fp32: gradient, two moments and weights -> moments and weights.

    Args:
        weights: bytes of a `weight_update_bytes`.
    """
    return Cost(parameters * (5 * _FP32 + weights))


def row_update(read: int, due: int, weights: int) -> Cost:
    """As `update`, of the entries of table rows: those that were read, whose gradient is also read for its norm and
    zeroed, and those that are due without a gradient.

    Args:
        read, due: entries.
        weights: bytes of a `weight_update_bytes`.
    """
    return Cost((read + due) * (4 * _FP32 + weights) + read * 3 * _FP32)
