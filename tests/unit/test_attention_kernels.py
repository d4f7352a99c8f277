"""The table of what an attention kernel of torch can run, held against torch itself on a CPU."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from egmla_megatron.attention.core_attention import BACKENDS, choose_backend
from egmla_megatron.errors import UserError


def _runs(name: str, precision: str, equal: bool, dropout: float) -> bool:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    q_BNSK, k_BNSK = (torch.randn(1, 2, 8, 16, dtype=dtype, requires_grad=True) for _ in range(2))
    v_BNSV = torch.randn(1, 2, 8, 16 if equal else 12, dtype=dtype, requires_grad=True)
    try:
        with sdpa_kernel(BACKENDS[name]):
            F.scaled_dot_product_attention(q_BNSK, k_BNSK, v_BNSV, is_causal=True, dropout_p=dropout).sum().backward()
    except RuntimeError as error:
        assert "No available kernel" in str(error) or "No viable backend" in str(error)
        return False
    return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", BACKENDS)
def test_what_runs_on_a_cpu_is_what_passes(name: str) -> None:
    for precision, equal, dropout in itertools.product(("fp32", "bf16"), (True, False), (0.0, 0.1)):
        given = {"cuda": False, "precision": precision, "equal_heads": equal, "dropout": dropout > 0}
        if _runs(name, precision, equal, dropout):
            assert choose_backend(name, **given) == name
        else:
            with pytest.raises(UserError, match=f"parallel.attention_backend: .* got {name}; allowed: auto, .*math"):
                choose_backend(name, **given)
        assert _runs(choose_backend("auto", **given), precision, equal, dropout)


def test_fp32_on_a_gpu() -> None:
    given = {"cuda": True, "equal_heads": True}
    for name in ("cudnn", "flash"):
        assert choose_backend(name, precision="bf16", **given) == name
        with pytest.raises(UserError, match=f"got {name}; allowed: auto, efficient, math"):
            choose_backend(name, precision="fp32", **given)
    assert choose_backend("auto", precision="fp32", **given) == "efficient"
