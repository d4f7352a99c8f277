"""Kernels beside what a machine allows: counted bytes and FLOPs against real calls, and a whole run on the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count

from egmla_megatron.bench.roofline import cost
from egmla_megatron.bench.roofline.case import Buffers, Case
from egmla_megatron.bench.roofline.cost import Cost, Machine
from egmla_megatron.bench.roofline.gate_cases import gate_cases, heads_cases, row_of_tokens
from egmla_megatron.bench.roofline.options import KernelBench
from egmla_megatron.bench.roofline.sizes import Linear, Sizes, linears
from egmla_megatron.bench.roofline.table import kernel_table, make_row, sum_of_rows
from egmla_megatron.bench.roofline.timing import HostTimer, Times, calls_of_graph
from egmla_megatron.bench.roofline.update_case import _row_case
from egmla_megatron.bench.zipf import probabilities
from egmla_megatron.config.check import check_config
from egmla_megatron.config.schema import ModelConfig
from egmla_megatron.model.count import count_parameters, flops_per_token
from tests.dist.harness import start
from tests.tiny import PLAIN, TINY, tiny_run

# a micro-batch of 3 sequences of 8 tokens, 7 of whose 24 ids are distinct
TRAIN: dict[str, Any] = {"seq_length": 8, "micro_batch_size": 3, "global_batch_size": 6}
MODELS = {
    "mul": TINY,
    "add_without_norm": replace(TINY, gate="add", gate_norm=False),
    "mla_with_q_lora": replace(TINY, q_lora_rank=10, **PLAIN),
}
GEMMS = ("forward", "input gradient", "weight gradient")
PASSES = ("forward", "backward")


def bench_of(model: ModelConfig, precision: str = "fp32") -> KernelBench:
    cfg = tiny_run(model, train={**TRAIN, "precision": precision})
    return KernelBench(cfg, check_config(cfg, 1), 2, 0.3, None)


def cases_of(model: ModelConfig, world: Any, precision: str = "fp32") -> tuple[Sizes, list[Case]]:
    from egmla_megatron.bench.roofline.session import all_cases, build_one_layer, sizes_of_built

    bench = bench_of(model, precision)
    built = build_one_layer(bench, world)
    sizes = sizes_of_built(bench, built)
    return sizes, all_cases(bench, sizes, built, world.device)


def nbytes(found: Any) -> int:
    tensors = (found,) if isinstance(found, Tensor) else found
    return sum(each.numel() * each.element_size() for each in tensors)


def moved(case: Case) -> int:
    """Bytes of all tensors that go into a call and come out of it."""
    call = case.prepare()
    state = call.before() if call.before else ()
    written = call.run(state)
    return nbytes(call.read) + nbytes(written) + (nbytes(state) if call.reads_before else 0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_those_of_the_tensors(world: Any, name: str, precision: str) -> None:
    _, cases = cases_of(MODELS[name], world, precision)
    assert {case.title: moved(case) for case in cases} == {case.title: case.cost.bytes for case in cases}


def test_bytes_of_a_weight_gradient_that_is_added(world: Any) -> None:
    """Only Transformer Engine's GEMM does it: main gradients are read and written in their own type."""
    sizes, _ = cases_of(TINY, world, "bf16")
    linear = Linear("q", 2, 24, 20, 30, in_layer=True)
    x_MK, dy_MN = (torch.empty(24, width, dtype=torch.bfloat16) for width in (20, 30))
    for kind, wide in ((torch.float32, 4), (torch.bfloat16, 2)):
        added = replace(sizes, gradients_in_layers=True, gradient_bytes=wide)
        main_NK = torch.empty(30, 20, dtype=kind)
        assert cost.linear_weight_gradient(linear, added).bytes == nbytes((x_MK, dy_MN, main_NK, main_NK))
        by_torch = nbytes((x_MK, dy_MN, torch.empty(30, 20, dtype=torch.bfloat16)))
        assert cost.linear_weight_gradient(replace(linear, in_layer=False), added).bytes == by_torch


def counted(case: Case) -> int:
    """FLOPs of a call as torch counts them."""
    call = case.prepare()
    state = call.before() if call.before else None
    with FlopCounterMode(display=False) as counter:
        call.run(state)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", MODELS)
def test_flops_are_those_that_torch_counts(world: Any, name: str) -> None:
    sizes, cases = cases_of(MODELS[name], world)
    found = {case.title: counted(case) for case in cases}
    expected = {case.title: case.cost.flops for case in cases}
    # torch counts every query with every key, and its unfused backward keeps the scores instead of computing them again
    square = 2 * sizes.length / (sizes.length + 1)
    attention = {title: expected.pop(title) * square for title in ("attention, forward", "attention, backward")}
    assert found.pop("attention, forward") == attention["attention, forward"]
    shape = (sizes.sequences, sizes.model.num_attention_heads, sizes.length)
    q_BNSK, v_BNSV = (*shape, sizes.heads.nope + sizes.heads.rope), (*shape, sizes.heads.v)
    fused = sdpa_backward_flop_count(v_BNSV, q_BNSK, q_BNSK, v_BNSV)
    assert fused > found.pop("attention, backward") and attention["attention, backward"] == fused
    assert found == expected
    assert sum(flops > 0 for flops in found.values()) == 3 * len(linears(sizes))


@pytest.mark.parametrize("name", MODELS)
def test_products_of_a_forward_pass_are_the_plans(world: Any, name: str) -> None:
    """All rows as often as they run, against the operations of a token that plans and MFU count with."""
    sizes, cases = cases_of(MODELS[name], world)
    found = sum(case.count * case.cost.flops for case in cases if case.direction == "forward" and case.counted)
    parts = flops_per_token(sizes.model, sizes.length).by_part
    gate = parts.get("gate_projection", 0)  # counted once a token there
    assert found == sizes.tokens * (sum(parts.values()) - gate) + sizes.rows * gate


def test_rows_and_how_often_they_run(world: Any) -> None:
    sizes, cases = cases_of(TINY, world)
    found = {(case.kernel, case.direction): case.count for case in cases}
    layers = ["q projection", "kv down-projection", "kv up-projection", "gate projection", "output projection"]
    expected: dict[tuple[str, str], float] = {
        (name, each): 2 for name in [*layers, "MLP gate and up", "MLP down"] for each in GEMMS
    }
    expected |= {("LM head", each): 1 for each in GEMMS}
    others = {"attention": 2, "RMSNorm of hidden": 5, "RMSNorm of the latent": 2, "SwiGLU": 2}
    others |= {"cross-entropy": 1, "gate and LayerNorm, by single operations": 2}
    others |= {"heads with RoPE, by single operations": 2}
    expected |= {(name, each): count for name, count in others.items() for each in PASSES}
    expected |= {("residual sum", "forward"): 4, ("residual sum", "backward"): 6}  # torch's norms add nothing
    assert found == expected | {("AdamW, torch, fused", "update"): 0.5}  # once in two micro-batches
    assert all(case.counted for case in cases)
    assert (sizes.distinct, sizes.rows) == (7, 8)
    update = cases[-1]
    assert update.cost.bytes * update.scale == 28 * count_parameters(TINY).total

    _, without = cases_of(MODELS["mla_with_q_lora"], world)
    names = {case.kernel for case in without}
    assert {"q down-projection", "q up-projection", "RMSNorm of q's latent"} <= names
    assert not any("gate" in name.replace("gate and up", "") for name in names)


@pytest.mark.parametrize("name", ["mul", "add_without_norm"])
def test_kernels_compute_what_stands_beside_them(world: Any, name: str) -> None:
    """Our Triton kernels, here by its interpreter, against single operations: same values, gradients and bytes."""
    pytest.importorskip("triton")
    sizes, _ = cases_of(MODELS[name], world)
    buffers = Buffers(torch.device("cpu"), torch.float32)
    *both, gate = [gate_cases(sizes, triton=True, buffers=buffers)[at] for at in (0, 1, slice(2, None))]
    heads = heads_cases(sizes, triton=True, buffers=buffers)
    assert all(case.counted for case in both) and not any(case.counted for case in (*gate, *heads))
    assert [moved(case) for case in both] == [case.cost.bytes for case in both]
    for kernel_forward, kernel_backward, forward, backward in (gate, heads):
        for kernel, operations in ((kernel_forward, forward), (kernel_backward, backward)):
            results = []
            for case in (kernel, operations):
                torch.manual_seed(3)
                call = case.prepare()
                written = call.run(call.before() if call.before else None)
                results.append((written,) if isinstance(written, Tensor) else written)
            for one, other in zip(*results, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
            assert moved(kernel) == kernel.cost.bytes == operations.cost.bytes


def test_updates_of_tables_by_rows(world: Any) -> None:
    """Half of the rows are read; the others that are due need no gradient."""
    pytest.importorskip("triton")
    buffers, cfg = Buffers(torch.device("cpu"), torch.float32), tiny_run(TINY)
    columns = TINY.num_layers * TINY.kv_emb_dim
    cfg = replace(cfg, optimizer=replace(cfg.optimizer, store_param_remainders=False))
    case = _row_case(cfg, 1, 9, cost.weight_update_bytes(4, halves=False), buffers)
    assert case.cost.bytes == 9 * columns * (6 * 4 + 4 + 3 * 4)  # none of 18 rows is due
    assert cost.weight_update_bytes(2, halves=True) == 8 == cost.weight_update_bytes(0, halves=False)
    call = case.prepare()
    assert call.before is not None
    for replay in range(2):
        call.before()
        before = [each.clone() for each in call.read]
        gradient, *after, squares = call.run(None)
        assert not gradient[::2].any() and torch.equal(gradient[1::2], before[0][1::2])
        torch.testing.assert_close(squares, before[0][::2].square().sum().reshape(1))
        for one, other in zip(after[:3], before[1:4], strict=True):  # without a gradient the second changes less
            assert replay or (one[::2] != other[::2]).any(dim=1).all()
            assert torch.equal(one[3::2], other[3::2])
        assert (after[2][::2] != before[3][::2]).any()


def test_rows_of_tokens_repeat_like_words(world: Any) -> None:
    sizes, _ = cases_of(TINY, world)
    large = replace(sizes, sequences=8, length=1024, distinct=1638, rows=1792)
    index_T = row_of_tokens(large)
    counts = torch.bincount(index_T)
    assert (len(index_T), len(counts), int(counts.min())) == (8192, 1638, 1)
    rest = 8192 - 1638
    most = probabilities(1638)[0]
    deviation = (rest * most * (1 - most)) ** 0.5
    assert abs(int(counts.max()) - 1 - rest * most) < 4 * deviation
    assert index_T[:100].unique().numel() > 30  # no order


def test_numbers_of_a_row() -> None:
    machine = Machine(bytes_per_s=4e12, flops_per_s=800e12)
    case = Case("k", "forward", 3, Cost(bytes=8_000_000, flops=800_000_000), lambda: pytest.fail("not called"))
    row = make_row(case, Times((4.0, 5.0, 2.5), 16), machine)
    assert (row["us_median"], row["n"], row["calls_at_once"]) == (4.0, 3, 16)
    assert row["us_p10"] == pytest.approx(2.8) and row["us_p90"] == pytest.approx(4.8)
    assert (row["tb_per_s"], row["share_of_copy"]) == pytest.approx((2.0, 0.5))
    assert (row["tflops_per_s"], row["share_of_product"]) == pytest.approx((200.0, 0.25))
    assert (row["bound"], row["bound_us"], row["share_of_bound"]) == ("memory", pytest.approx(2.0), pytest.approx(0.5))

    part = make_row(replace(case, cost=Cost(800, 8_000_000), scale=10.0), Times((1.0,), 1), machine)
    assert (part["bytes"], part["flops"], part["us_median"], part["timed_part"]) == (8000, 80_000_000, 10.0, 0.1)
    assert part["bound"] == "matrix" and part["bound_us"] == pytest.approx(0.1)
    beside = make_row(replace(case, counted=False), Times((100.0,), 1), machine)
    assert sum_of_rows([row, part, beside]) == pytest.approx({"us_median": 42.0, "bound_us": 6.3})


def test_calls_of_a_graph() -> None:
    """They exceed a cache of 50 MB twice, last a millisecond, and fit into memory."""
    machine = Machine(bytes_per_s=4e12, flops_per_s=800e12)
    free = 100 * 10**9

    def calls(**needs: int) -> int:
        return calls_of_graph(Cost(**needs), machine, 50_000_000, free)

    assert calls(bytes=2_000_000, flops=40_000_000_000) == 50  # 100 MB
    assert calls(bytes=20_000_000) == 200  # 5 us each
    assert calls(bytes=1000) == 256
    assert calls(bytes=10**9) == 4
    assert calls(bytes=5 * 10**9) == 2
    assert calls(bytes=30 * 10**9) == 1


def test_the_host_timer_makes_every_call_anew(world: Any) -> None:
    _, cases = cases_of(TINY, world)
    backward = next(case for case in cases if case.title == "cross-entropy, backward")
    made: list[object] = []

    def prepare() -> Any:
        made.append(None)
        return backward.prepare()

    times = HostTimer(3)(replace(backward, prepare=prepare))
    assert len(made) == 4 and len(times.us) == 3 and min(times.us) > 0


def test_more_than_the_bound_is_marked() -> None:
    machine = Machine(bytes_per_s=4e12, flops_per_s=800e12)
    case = Case("k", "forward", 3, Cost(bytes=8_000_000), lambda: pytest.fail("not called"))
    settings = {"model": "m", "distinct_ids": 0, "precision": "fp32", "sequences": 1, "length": 8}
    settings |= {"implementation": "torch", "attention_backend": "math", "kernels": "torch"}
    result: dict[str, Any] = {"settings": settings, "hardware": {"gpu": None, "cpu": "c"}, "commit": "", "remarks": []}
    result |= {"machine": {"copy_tb_per_s": 4.0, "product_tflops_per_s": 800.0}}
    for us, marks in ((1.0, 2), (4.0, 0)):
        rows = [make_row(case, Times((us,), 1), machine)]
        text = kernel_table(result | {"rows": rows, "sum": sum_of_rows(rows)})
        assert text.count("(!)") == marks and ("200.0% (!) |" in text) is bool(marks)


def test_a_whole_run(tmp_path: Path) -> None:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 128}
    command = ["tools/bench_kernels.py", "quickstart", *(f"model.{name}={size}" for name, size in sizes.items())]
    command += ["train.seq_length=16", "train.micro_batch_size=2", "train.global_batch_size=4"]
    command += ["parallel.gate_group=1", "--repeats=3", "--distinct-fraction=0.5", f"--json={tmp_path / 'out.json'}"]
    output = start(1, command, tmp_path / "log").succeed()
    result = json.loads((tmp_path / "out.json").read_text())
    rows = result["rows"]
    assert len(rows) == 41 and {row["n"] for row in rows} == {3}
    for row in rows:
        assert row["us_p10"] <= row["us_median"] <= row["us_p90"] and row["us_p10"] > 0
        assert row["share_of_bound"] > 0 and row["bound"] in ("memory", "matrix")
    total = sum(row["per_micro_batch"] * row["us_median"] for row in rows)
    assert result["sum"]["us_median"] == pytest.approx(total)
    assert {"hardware", "software", "commit", "command", "settings", "machine"} < result.keys()
    assert result["command"].startswith("tools/bench_kernels.py quickstart ")
    assert result["settings"]["distinct_ids"] == 16
    assert min(result["machine"].values()) > 0

    lines = [line.strip("| ").split(" | ") for line in output.splitlines() if line.startswith("| ")]
    assert len(lines) == 43 and {len(line) for line in lines} == {12}
    assert [line[0] for line in lines[2:]] == [row["kernel"] for row in rows]
    assert "No CUDA device: times by the host's clock" in output
    assert output.splitlines()[-1].startswith(f"Sum per micro-batch: {total / 1e3:,.3f} ms; of the bounds: ")
