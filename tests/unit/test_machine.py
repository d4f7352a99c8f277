"""What a configuration needs of this machine."""

from __future__ import annotations

import pytest

from egmla_megatron.config.load import load_config
from egmla_megatron.environment import gpu_count
from egmla_megatron.errors import UserError
from egmla_megatron.train import machine

EQUAL = ["model.v_head_dim=48"]  # as wide as q and k of the quickstart's model


@pytest.mark.parametrize(
    ("installed", "gpus", "ranks", "overrides", "message"),
    [
        (False, 8, "8", ["parallel.implementation=te", "train.precision=bf16"], "transformer_engine is not installed"),
        (True, 0, "1", ["parallel.implementation=te", "train.precision=bf16"], "no CUDA device is visible"),
        (False, 1, "2", [], "ranks of this machine: got 2, allowed up to 1"),
        (True, 8, "8", ["parallel.implementation=te", "train.precision=bf16"], ""),
        (False, 0, "2", [], ""),
        (True, 0, "2", ["train.cuda_graph=true"], "train.cuda_graph: got true"),
        (True, 2, "2", ["train.cuda_graph=true"], ""),
        (True, 0, "2", ["train.cuda_graph=auto"], ""),
        (True, 2, "2", ["train.cuda_graph=auto"], ""),
        (True, 0, "1", ["parallel.attention_backend=cudnn"], "runs on GPUs, .* got cudnn; allowed: auto, math; fix"),
        (True, 0, "1", [*EQUAL, "parallel.attention_backend=efficient"], "got efficient; allowed: auto, flash, math"),
        (True, 0, "1", [*EQUAL, "parallel.attention_backend=flash"], ""),
        (True, 0, "1", ["parallel.attention_backend=flash"], "heads of q, k and v of one size: got flash"),
        (
            True,
            0,
            "1",
            [*EQUAL, "parallel.attention_backend=flash", "model.attention_dropout=0.1"],
            "no dropout .* flash",
        ),
        (True, 0, "1", ["parallel.attention_backend=math"], ""),
        (True, 0, "1", ["parallel.attention_backend=te_fused"], "layers of torch: got te_fused; .*implementation=te"),
        (True, 1, "1", ["parallel.attention_backend=te_fused"], ""),
        (False, 1, "1", ["parallel.implementation=torch", "parallel.attention_backend=cudnn"], "precision=fp32"),
        (False, 1, "1", ["parallel.implementation=torch", "parallel.attention_backend=efficient"], ""),
        (True, 0, "1", ["parallel.kernels=triton"], "parallel.kernels: got triton, allowed torch without a CUDA"),
        (True, 0, "1", ["train.fp8=tensorwise"], "train.fp8: got tensorwise, allowed none without a CUDA"),
    ],
)
def test_what_the_machine_lacks(
    monkeypatch: pytest.MonkeyPatch, installed: bool, gpus: int, ranks: str, overrides: list[str], message: str
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr(machine, "gpu_count", lambda: gpus)
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda _: object() if installed else None)
    cfg = load_config("quickstart", overrides, gpu=gpus > 0)
    if not message:
        machine.check_machine(cfg)
        return
    with pytest.raises(UserError, match=message):
        machine.check_machine(cfg)


def test_the_driver_counts_the_gpus_that_torch_counts() -> None:
    import torch

    assert gpu_count() == torch.cuda.device_count()
