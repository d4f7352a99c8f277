"""The GEMMs of the linear layers: output, input gradient and weight gradient of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from egmla_megatron.attention.main_gradient import put_product
from egmla_megatron.bench.roofline import cost
from egmla_megatron.bench.roofline.case import Buffers, Call, Case
from egmla_megatron.bench.roofline.sizes import Linear, Sizes, linears

__all__ = ["linear_cases"]

# M rows, K inputs, N outputs


@dataclass(frozen=True)
class _Gemms:
    """Who multiplies."""

    output: Callable[[Tensor, Tensor], Tensor]  # x [M,K], w [N,K] -> [M,N]
    input_gradient: Callable[[Tensor, Tensor], Tensor]  # dy [M,N], w [N,K] -> [M,K]
    weight_gradient: Callable[[Tensor, Tensor], Tensor]  # dy [M,N], x [M,K] -> [N,K]
    added_gradient: Callable[[Tensor, Tensor, Tensor], Tensor]  # the same added to a main gradient [N,K]


def _torch_gemms() -> _Gemms:
    """As megatron-core's linear layers without Transformer Engine, and as torch's own."""

    def added(dy_MN: Tensor, x_MK: Tensor, main_NK: Tensor) -> Tensor:
        put_product(main_NK, dy_MN.t(), x_MK, overwrite=False)
        return main_NK

    return _Gemms(
        output=lambda x_MK, w_NK: torch.matmul(x_MK, w_NK.t()),
        input_gradient=lambda dy_MN, w_NK: dy_MN.matmul(w_NK),
        weight_gradient=lambda dy_MN, x_MK: dy_MN.t().matmul(x_MK),
        added_gradient=added,
    )


def _te_gemms() -> _Gemms:
    """As Transformer Engine's linear layers call them; factors count in column-major order, so weights come first."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    def added(dy_MN: Tensor, x_MK: Tensor, main_NK: Tensor) -> Tensor:
        return general_gemm(x_MK, dy_MN, layout="NT", grad=True, out_dtype=main_NK.dtype, out=main_NK, accumulate=True)[
            0
        ]

    return _Gemms(
        output=lambda x_MK, w_NK: general_gemm(w_NK, x_MK, out_dtype=x_MK.dtype)[0],
        input_gradient=lambda dy_MN, w_NK: general_gemm(w_NK, dy_MN, layout="NN", grad=True, out_dtype=dy_MN.dtype)[0],
        weight_gradient=lambda dy_MN, x_MK: general_gemm(x_MK, dy_MN, layout="NT", grad=True, out_dtype=dy_MN.dtype)[0],
        added_gradient=added,
    )


def linear_cases(sizes: Sizes, implementation: str, buffers: Buffers) -> list[Case]:
    """Three rows of every linear layer.

    Args:
        implementation: "te" or "torch", of the layers, but for those that are torch's anyway (`by_torch`).
    """
    of_torch = _torch_gemms()
    of_layers = _te_gemms() if implementation == "te" else of_torch
    found = []
    for linear in linears(sizes):
        found += _cases_of(linear, sizes, of_torch if linear.by_torch else of_layers, buffers)
    return found


def _cases_of(linear: Linear, sizes: Sizes, gemms: _Gemms, buffers: Buffers) -> list[Case]:
    def x_MK() -> Tensor:
        return buffers.normal(linear.rows, linear.inputs)

    def dy_MN() -> Tensor:
        return buffers.normal(linear.rows, linear.outputs)

    def w_NK() -> Tensor:
        return buffers.normal(linear.outputs, linear.inputs)

    def call(gemm: Callable[..., Tensor], *factors: Callable[[], Tensor]) -> Callable[[], Call]:
        def prepare() -> Call:
            made = tuple(make() for make in factors)
            return Call(made, lambda _: gemm(*made))

        return prepare

    input_gradient = call(gemms.input_gradient, dy_MN, w_NK)
    if linear.beside:
        input_gradient = call(lambda others_MK, dy_MN, w_NK: others_MK.addmm_(dy_MN, w_NK), x_MK, dy_MN, w_NK)
    weight_gradient = call(gemms.weight_gradient, dy_MN, x_MK)
    if linear.in_layer and sizes.gradients_in_layers:
        kind = torch.float32 if sizes.gradient_bytes == 4 else torch.bfloat16
        weight_gradient = call(
            gemms.added_gradient, dy_MN, x_MK, lambda: buffers.normal(linear.outputs, linear.inputs, dtype=kind)
        )
    name, count = linear.name, linear.count
    return [
        Case(name, "forward", count, cost.linear_output(linear, sizes), call(gemms.output, x_MK, w_NK)),
        Case(
            name,
            "input gradient",
            count,
            cost.linear_input_gradient(linear, sizes),
            input_gradient,
        ),
        Case(name, "weight gradient", count, cost.linear_weight_gradient(linear, sizes), weight_gradient),
    ]
