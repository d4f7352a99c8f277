"""Every step time that was measured on GPUs (tools/records), with the configuration that it belongs to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from egmla_megatron.config.check import check_config
from egmla_megatron.config.load import load_config
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.report.cards import find_card
from egmla_megatron.report.memory import parameters_of_rank
from egmla_megatron.report.step_time import COPY_EFFICIENCY

__all__ = ["WHOLE_MASTER_WEIGHTS", "RecordedStep", "recorded_steps"]

OWN_MASTER_WEIGHTS = "optimizer.fused_master_weights=false"  # of megatron-core, in all runs before speed_one_gpu.json
# of records without the key `store_param_remainders`
WHOLE_MASTER_WEIGHTS = "optimizer.store_param_remainders=false"
# runs before distinct ids, kernels and CUDA graphs
BEFORE = ["parallel.unique_ids=false", "train.cuda_graph=false", OWN_MASTER_WEIGHTS]
LAYOUTS = {  # end of a name in layouts_two_gpus.json -> settings
    "gate_group_2_overlap_grad_reduce_true_overlap_param_gather_true": ["parallel.gate_group=2"],
    "pipeline_2": [
        "parallel.pipeline=2",
        "parallel.overlap_param_gather=false",
        "parallel.overlap_grad_reduce=false",
    ],
    "tensor_2": ["parallel.tensor=2"],
    "tensor_2_sequence_true_gate_group_2": ["parallel.tensor=2", "parallel.sequence=true", "parallel.gate_group=2"],
}


@dataclass(frozen=True)
class RecordedStep:
    """One measurement."""

    name: str
    cfg: RunConfig
    ranks: int
    card: str
    te: bool
    triton: bool
    link_gb_per_s: float | None  # as measured; None: not
    one_gpu_nodes: bool  # each rank behind the link
    step_ms: float  # median
    present: bool = False  # measured with the present kernels
    also_ms: float = 0.0  # of which a pass that steps have no more

    @property
    def comparable(self) -> bool:
        """Whether an estimate should meet it: before, the optimizer, cross-entropy, SwiGLU and norms had slower
        kernels, which shows where neither the host nor a slow link takes longer."""
        return self.present or not self.cfg.train.cuda_graph or self.one_gpu_nodes


def recorded_steps(root: Path) -> Iterator[RecordedStep]:
    """Of all files."""

    def read(name: str) -> Any:
        return json.loads((root / "tools" / "records" / f"{name}.json").read_text())

    yield from _first_runs(read("first_gpu_runs"))
    yield from _layouts(read("layouts_two_gpus"))
    yield from _graphs(read("kernels_and_graphs"))
    yield from _sharding(read("sharding_two_gpus"))
    yield from _one_gpu(read("speed_one_gpu"), present=False)
    for name in ("speed_device_adam", "speed_table_rows"):
        yield from _one_gpu(read(name), present=False)
    yield from _one_gpu(read("speed_remainders"), present=True)
    yield from _two_gpus(read("speed_two_gpus"))


def _first_runs(record: Any) -> Iterator[RecordedStep]:
    for run in record["runs"]:
        ms = run.get("step_ms_median") or run["tokens_per_step"] / run["tokens_per_second_mean"] * 1e3
        ranks = int(run["hardware"][0])
        config, batch = run["run"].split(",")[0], run["tokens_per_step"] // 1024
        settings = [f"train.global_batch_size={batch}", f"parallel.gate_group={run['gate_group']}", *BEFORE]
        card = "h200" if "H200" in run["hardware"] else "h100"
        te = run["implementation"] == "te"
        name = f"{config} {ranks} x {card} {run['implementation']} W={run['gate_group']} batch {batch}"
        yield RecordedStep(name, load_config(config, settings), ranks, card, te, False, None, False, ms)


def _layouts(record: Any) -> Iterator[RecordedStep]:
    for name, run in record["runs"].items():
        te, one = not name.endswith("torch") and "two_torch" not in name, not name.startswith("two")
        settings = [] if one else LAYOUTS[name.removeprefix("two_te_").removeprefix("two_torch_")]
        batch = 8 if name.startswith("te1") else 16
        cfg = load_config("pretrain_base", [f"train.global_batch_size={batch}", *BEFORE, *settings])
        yield RecordedStep(f"layouts {name}", cfg, 2 - one, "h200", te, False, None, False, run["step_ms_median"])


def _graphs(record: Any) -> Iterator[RecordedStep]:
    for row in record["kernels"]["rows"]:
        cfg = load_config("pretrain_base", ["train.global_batch_size=8", "train.cuda_graph=true", OWN_MASTER_WEIGHTS])
        triton = row["kernels"] == "triton"
        name = f"graph {row['kernels']} {'fused' if row.get('fused_grad_accumulation') else ''}"
        yield RecordedStep(name, cfg, 1, "h200", True, triton, None, False, row["step_ms_median"])
    for ranks, kind in ((1, "one_gpu"), (2, "two_gpus_W2")):
        for how in ("eager", "graph"):
            settings = ["train.global_batch_size=16", f"train.cuda_graph={str(how == 'graph').lower()}"]
            cfg = load_config("pretrain_base", [*settings, f"parallel.gate_group={ranks}", OWN_MASTER_WEIGHTS])
            ms = 16 * 1024 / record["trainer_cuda_graph"][kind][f"{how}_tokens_per_second"] * 1e3
            yield RecordedStep(f"trainer {kind} {how}", cfg, ranks, "h200", True, False, None, False, ms)


def _sharding(record: Any) -> Iterator[RecordedStep]:
    for result in record["results"]:
        if "unsteady" in result.get("note", ""):
            continue
        given = result["settings"]
        sharded, overlap = (str(given[key]).lower() for key in ("distributed_optimizer", "overlap"))
        common = [
            "train.global_batch_size=16",
            f"optimizer.distributed={sharded}",
            f"parallel.grad_reduce_dtype={given['gradients']}",
            f"parallel.overlap_grad_reduce={overlap}",
            f"parallel.overlap_param_gather={str(given['distributed_optimizer'] and given['overlap']).lower()}",
            f"train.cuda_graph={str('cuda_graph=true' in result['command']).lower()}",
        ]
        for row in result["rows"]:
            variant = row["variant"]
            unique = variant == "vanilla_unique" or ("dimension" in variant and "no_unique" not in variant)
            settings = [f"parallel.gate_group={row['gate_group']}", f"parallel.unique_ids={str(unique).lower()}"]
            if "all_gather" in variant:
                settings.append("parallel.gate_exchange=all_gather")
            settings.append(WHOLE_MASTER_WEIGHTS if "in_place" in result["name"] else OWN_MASTER_WEIGHTS)
            yield RecordedStep(
                name=f"{result['name']} {variant}",
                cfg=load_config("pretrain_base", [*common, *settings]),
                ranks=2,
                card="h200",
                te=given["implementation"] == "te",
                triton=result["name"].startswith(("kernels_", "zipf_")),
                link_gb_per_s=result["link"]["gb_per_s"],
                one_gpu_nodes=result["link_kind"] != "nvlink",
                step_ms=row["step_ms_median"],
            )


def _one_gpu(record: Any, *, present: bool) -> Iterator[RecordedStep]:
    before = [] if record.get("store_param_remainders") else [WHOLE_MASTER_WEIGHTS]
    before += [] if record.get("deferred_table_updates") else ["optimizer.deferred_table_updates=false"]
    for title, rows in record["bench_train"].items():
        if not title.startswith("pretrain"):
            continue
        config, _, rest = title.partition(",")
        batch = 8 * (int(rest.split()[0]) if rest else 1)
        for row in rows:
            if row["reported"] or "train.fp8=tensorwise" in row["settings"]:
                continue  # steps as those of the first row; the estimate knows no FP8
            cfg = load_config(
                config, [f"train.global_batch_size={batch}", "train.cuda_graph=true", *before, *row["settings"]]
            )
            name = f"{title} {row['variant']}"
            yield RecordedStep(name, cfg, 1, "h200", True, True, None, False, row["step_ms_median"], present)


def _two_gpus(record: Any) -> Iterator[RecordedStep]:
    """With a pass over all gradients before their sum, for the mean."""
    for title, rows in record["bench_train"].items():
        for row in rows:
            settings = ["train.global_batch_size=16", "train.cuda_graph=true", WHOLE_MASTER_WEIGHTS, *row["settings"]]
            cfg = load_config(title, settings)
            gradients = sum(parameters_of_rank(cfg, check_config(cfg, 2), 0))
            pass_ms = 2 * 4 * gradients / (COPY_EFFICIENCY * find_card("h200", None, None).memory_gb_per_s * 1e6)
            yield RecordedStep(
                f"two GPUs, {title} {row['variant']}", cfg, 2, "h200", True, True, None, False, row["step_ms_median"],
                True, pass_ms,
            )  # fmt: skip
