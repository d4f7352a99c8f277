"""What the table of kernels can be asked for, and what it says of a configuration that it changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from egmla_megatron.bench.roofline.options import kernel_bench
from egmla_megatron.errors import UserError


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.tensor=2"], "parallel.tensor: .* whole layers.*got 2; allowed: 1; fix: set parallel.tensor=1"),
        (["parallel.pipeline=2"], "parallel.pipeline: .* all layers on one device: got 2"),
        (
            ["model.attention=mha"],
            "model.attention: the tool times the kernels of MLA and EG-MLA: got mha; allowed: mla",
        ),
        (["train.recompute=full"], "train.recompute: .* computed again: got full; allowed: none"),
        (["train.fp8=tensorwise"], "train.fp8: .* products in bf16 or fp32: got tensorwise; allowed: none"),
        (["model.hidden_dropout=0.1"], "model.hidden_dropout: .* got 0.1; allowed: 0.0"),
        (["parallel.unique_ids=false"], "parallel.unique_ids: .* got false; allowed: true"),
    ],
)
def test_what_other_kernels_would_run_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        kernel_bench("quickstart", overrides, 1, 0.2, None, cuda=False)


def test_what_differs_from_the_configuration_is_said() -> None:
    bench = kernel_bench("quickstart", [], 1, 0.2, None, cuda=False)  # has parallel.gate_group=2
    assert bench.layout.gate_group == bench.cfg.parallel.gate_group == 1
    (remark,) = bench.remarks
    assert "measured with parallel.gate_group=1, where quickstart has 2" in remark
    (remark,) = kernel_bench("pretrain_base", [], 1, 0.2, None, cuda=False).remarks
    assert remark.startswith("No CUDA device: computed in fp32, where pretrain_base has train.precision=bf16")
    for settings, cuda in ((["train.precision=bf16"], False), ([], True)):
        bench = kernel_bench("pretrain_base", settings, 1, 0.2, None, cuda=cuda)
        assert bench.remarks == () and bench.cfg.train.precision == "bf16"


def test_options_that_cannot_be_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = ["parallel.gate_group=1"]
    assert kernel_bench("quickstart", one, 1, 1.0, None, cuda=False).layout.num_microbatches == 4
    with pytest.raises(UserError, match="--repeats: got 0"):
        kernel_bench("quickstart", one, 0, 0.2, None, cuda=False)
    for fraction in (0.0, -1.0, 1.01, float("nan")):
        with pytest.raises(UserError, match="--distinct-fraction: got"):
            kernel_bench("quickstart", one, 1, fraction, None, cuda=False)
    with pytest.raises(UserError, match="--json: got"):
        kernel_bench("quickstart", one, 1, 0.2, tmp_path / "none" / "out.json", cuda=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="number of ranks: got 2"):
        kernel_bench("quickstart", one, 1, 0.2, None, cuda=False)
