"""Context parallelism and interleaved pipelines on two GPUs against data parallelism, and their kernels on one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.dist.harness import results, start

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
WORKER = Path(__file__).with_name("parallel_worker.py")


def run(folder: Path, kernel: str, what: str) -> list[dict]:
    """What both ranks found."""
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    if kernel == "te" and importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("transformer_engine is not installed")
    return results(start(2, [str(WORKER), str(folder), kernel, what], folder / "log"), folder, 2)


@pytest.mark.parametrize("kernel", ["te", "cudnn", "efficient", "flash"])
def test_two_gpus_train_alike_under_every_layout(tmp_path: Path, kernel: str) -> None:
    found = run(tmp_path, kernel, "steps")[0]
    print(kernel, found)
    for numbers in found.values():
        assert numbers == pytest.approx(found["dp2"], rel=0.01)  # bf16; losses and gradient norms


@pytest.mark.parametrize("kernel", ["te", "cudnn"])
def test_tensor_parallel_gradients_are_whole_on_every_rank(tmp_path: Path, kernel: str) -> None:
    """Above all of the RoPE rows of the down-projection, which megatron-core alone leaves as one rank's part."""
    for found in run(tmp_path, kernel, "gradients"):
        for layout, errors in found.items():
            assert errors.pop("drifted") == []
            worst = max(errors, key=lambda name: errors[name])
            print(f"{kernel} {layout}: worst {worst} {errors[worst]:.4f}")
            assert errors[worst] < 0.06, (layout, worst, errors[worst])  # bf16


@pytest.mark.parametrize(("kernel", "width"), [("cudnn", 192), ("efficient", 192), ("flash", 128)])
def test_the_last_queries_alone_keep_the_fused_kernel(kernel: str, width: int) -> None:
    """What context parallelism asks of a kernel: a chunk of queries against the keys up to its end."""
    import torch
    from megatron.core.transformer.enums import AttnMaskType

    from egmla_megatron.attention.core_attention import TorchCoreAttention

    config = SimpleNamespace(
        attention_dropout=0.0, sdpa_backend=kernel, sequence_parallel=False, context_parallel_size=1
    )
    core = TorchCoreAttention(config, 1, AttnMaskType.causal, "self")
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(384, 2, 4, size, device="cuda", generator=generator).bfloat16().requires_grad_()
        for size in (width, width, 128)
    )
    weights = torch.randn(128, 2, 4 * 128, device="cuda", generator=generator).bfloat16()
    whole, last = core(q, k, v, None)[-128:], core(q[-128:], k, v, None)
    expected = torch.autograd.grad((whole * weights).sum(), (q, k, v))
    got = torch.autograd.grad((last * weights).sum(), (q, k, v))
    for mine, theirs in zip((last, *got), (whole, *expected), strict=True):
        assert (mine - theirs).float().norm() < 0.02 * theirs.float().norm()
