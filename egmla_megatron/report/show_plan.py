"""Plans as short tables for a person to read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from egmla_megatron.report.cards import USABLE
from egmla_megatron.report.step_time import ERROR_OF_EAGER

__all__ = ["format_comparison", "format_plan", "format_search"]

_GIB, _MIB = 2**30, 2**20
_LAYOUT = {  # field of `Layout` -> its name for a person
    "tp": "tensor parallelism (TP)",
    "pp": "pipeline stages (PP)",
    "vp": "chunks of a stage",
    "cp": "context parallelism (CP)",
    "dp": "data parallelism (DP)",
    "gate_group": "gate group (W)",
    "gate_data_parallel": "replicas of a slice of the tables",
    "num_microbatches": "micro-batches of a rank and step",
    "layers_per_stage": "layers of a stage",
}


def _line(name: str, value: str, unit: str = "", note: str = "") -> str:
    return f"  {name:<34} {value:>12} {unit}{'  ' + note if note else ''}".rstrip()


def format_plan(plan: dict[str, Any]) -> str:
    """The plan as lines; sizes in millions, MFLOP, MiB and GiB."""
    blocks = [_model(plan), _cache(plan), _operations(plan)]
    if "layout" in plan:
        blocks += [_layout(plan), _memory(plan), _sent(plan)]
    else:
        sizes = plan["training_memory_bytes"].items()
        lines = [_line(part, f"{size / _GIB:,.2f}", "GiB") for part, size in sizes]
        blocks.append([f"{plan['precision']} training memory before sharding and without activations", *lines])
    if "estimate" in plan:
        blocks += [_time(plan), _budget(plan)]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _model(plan: dict[str, Any]) -> list[str]:
    lines = [plan["model"]]
    for key in ("active_params", "gate_table_params", "total_params"):
        lines.append(_line(key, f"{plan[key] / 1e6:,.1f}", "M"))
    lines += [_line(f"  {part}", f"{count / 1e6:,.3f}", "M") for part, count in plan["params_by_part"].items()]
    return lines


def _cache(plan: dict[str, Any]) -> list[str]:
    lines = ["KV cache (bf16)", _line("kv_cache_elements_per_token", f"{plan['kv_cache_elements_per_token']:,d}")]
    own = plan["kv_cache"]["this model"]["bytes_per_token"]
    for name, sizes in plan["kv_cache"].items():
        context = f"{sizes['bytes_per_32k_context'] / _MIB:,.0f} MiB for 32k tokens"
        ratio = "" if name == "this model" else f", {own / sizes['bytes_per_token']:.1%} of it here"
        lines.append(_line(name, f"{sizes['bytes_per_token']:,d}", "bytes a token", context + ratio))
    return lines


def _operations(plan: dict[str, Any]) -> list[str]:
    by_part = plan["flops_per_token_forward_by_part"]
    lines = [f"operations per token at {plan['seq_length']} tokens, forward (a multiply-add is two)"]
    lines += [_line(part, f"{count / 1e6:,.1f}", "MFLOP") for part, count in by_part.items()]
    lines.append(_line("forward", f"{plan['flops_per_token_forward'] / 1e6:,.1f}", "MFLOP"))
    lines.append(_line("forward and backward", f"{plan['flops_per_token_forward_backward'] / 1e6:,.1f}", "MFLOP"))
    distinct = plan.get("distinct_ids_of_micro_batch")
    if distinct:
        lines.append(
            _line("distinct ids of a micro-batch", f"{100 * distinct['fraction']:.1f}", "%", distinct["origin"])
        )
    return lines


def _layout(plan: dict[str, Any]) -> list[str]:
    layout = plan["layout"]
    lines = [f"layout of {layout['world_size']} ranks"]
    lines += [_line(_LAYOUT[name], f"{size:,d}") for name, size in layout.items() if name != "world_size"]
    for stage, part in enumerate(plan["params_per_rank_by_stage"]):
        name = f"parameters of a rank{f', stage {stage}' if layout['pp'] > 1 else ''}"
        lines.append(
            _line(name, f"{sum(part.values()) / 1e6:,.1f}", "M", f"{part['gate_tables'] / 1e6:,.1f} M in tables")
        )
    return lines


def _memory(plan: dict[str, Any]) -> list[str]:
    where = f"stage {plan['memory_worst_stage']}, {plan['memory_assumes']}"
    lines = [f"memory of the GPU that needs most ({where}; CUDA and NCCL hold 1 to 3 GiB more)"]
    notes = {
        "optimizer": _others(
            plan["optimizer_bytes"], "distributed" if plan["distributed_optimizer"] else "not distributed"
        ),
        "activations": _others(plan["activations_bytes_by_recompute"], plan["recompute"], "recompute "),
    }
    for part, size in plan["memory_per_rank_bytes"].items():
        lines.append(_line(part, f"{size / _GIB:,.2f}", "GiB", notes.get(part, "")))
    if "fits" in plan:
        card = plan["card"]
        verdict = "fits" if plan["fits"] else "does not fit"
        usable = card["memory_gib"] * USABLE
        lines.append(
            f"  {verdict} into one {card['name']} of {card['memory_gib']:.1f} GiB, {usable:.1f} of them usable"
        )
    return lines


def _others(sizes: dict[str, int], chosen: str, word: str = "") -> str:
    """What was chosen, and what the other choices would take."""
    others = [f"{name} {size / _GIB:,.2f}" for name, size in sizes.items() if name != chosen]
    return f"{word}{chosen}; {', '.join(others)}"


def _sent(plan: dict[str, Any]) -> list[str]:
    if not plan["sent_per_step_and_rank"]:
        return []
    lines = ["sent by a rank in a step (the stage that sends most)"]
    for each in plan["sent_per_step_and_rank"]:
        note = f"{each['kind']} over {each['ranks']}"
        lines.append(_line(each["purpose"], f"{each['sent_bytes'] / _MIB:,.1f}", "MiB", note))
    total = sum(each["sent_bytes"] for each in plan["sent_per_step_and_rank"])
    return [*lines, _line("total", f"{total / _MIB:,.1f}", "MiB")]


def _time(plan: dict[str, Any]) -> list[str]:
    found, card = plan["estimate"], plan["card"]
    gpus = plan["layout"]["world_size"]
    if found is None:
        return [f"no estimate of the step time: {plan['estimate_missing']}"]
    how = "passes as one CUDA graph, " if plan["cuda_graph"] else ""
    lines = [f"a step of {found['tokens_per_step']:,d} tokens on {gpus} {card['name']}, {how}estimated"]
    needs = {
        "matrix arithmetic": found["matrix_s"],
        "memory traffic": found["memory_s"],
        "small kernels": found["small_kernels_s"],
        "host launches": found["host_s"],
        "network": found["network_exposed_s"],
        "pipeline bubble": found["bubble_s"],
    }
    for name, seconds in needs.items():
        notes = ["<- the limit"] if name == found["limited_by"] else []
        if name == "network":
            notes.insert(0, f"not hidden, of {found['network_s'] * 1e3:,.1f} ms")
        lines.append(_line(name, f"{seconds * 1e3:,.1f}", "ms", " ".join(notes)))
    if found["overlap_s"]:
        lines.append(_line("device and host at once", f"{-found['overlap_s'] * 1e3:,.1f}", "ms", "counted twice above"))
    off = f"give or take {plan['estimate_error']:.0%}"
    lines.append(_line("step", f"{found['step_s'] * 1e3:,.1f}", "ms", off))
    per_gpu = f"{_two(found['tokens_per_second_per_rank'])} a GPU"
    lines.append(_line("tokens/s", _two(found["tokens_per_second"]), "", per_gpu))
    lines.append(_line("model TFLOP/s a GPU", _two(found["tflops_per_second_per_rank"]), "", f"MFU {found['mfu']:.0%}"))
    if plan["graph_tokens_per_second"]:
        lines.append(_line("with train.cuda_graph=true", _two(plan["graph_tokens_per_second"]), "tokens/s"))
    return [*lines, *_rests_on(plan)]


def _two(value: float) -> str:
    """Two digits: estimates are off by more than the third."""
    return f"{float(f'{value:.2g}'):,.6g}" if value < 1e6 else f"{float(f'{value:.2g}'):,.0f}"


def _rests_on(plan: dict[str, Any]) -> list[str]:
    cluster, ranks = plan["cluster"], plan["layout"]["world_size"]
    lines = [
        "  Rests on steps of Base and 1.2B on one and two H100 and H200 (tools/records/README.md), which it meets",
        f"  within 6% as CUDA graphs and {ERROR_OF_EAGER:.0%} where the host launches. Other cards, more GPUs, larger",
        "  models: not measured.",
    ]
    rates = []
    if cluster["gpus_per_node"] > 1:
        rates.append(f"{cluster['gpu_gb_per_s']:,.1f} GB/s a GPU inside a node ({cluster['gpu_origin']})")
    if ranks > cluster["gpus_per_node"]:
        rates.append(
            f"{cluster['node_gb_per_s']:,.1f} GB/s a node of {cluster['gpus_per_node']} ({cluster['node_origin']})"
        )
    return [*lines, f"  Links: {', '.join(rates)}."] if rates else lines


def _budget(plan: dict[str, Any]) -> list[str]:
    if plan["estimate"] is None:
        return []
    budget = plan["budget"]
    lines = [f"the whole run: {plan['tokens'] / 1e9:,.2f} billion tokens in {plan['steps']:,d} steps (those alone)"]
    lines.append(_line("time", _two(budget["days"]), "days", f"give or take {plan['estimate_error']:.0%}"))
    lines.append(_line("GPU-hours", _two(budget["gpu_hours"])))
    if budget["cost"] is not None:
        lines.append(_line("cost", _two(budget["cost"]), "", f"at {budget['gpu_hour_price']:g} a GPU-hour"))
    return lines


def format_search(found: dict[str, Any], most: int = 12) -> str:
    """The first layouts as lines for a person to read."""
    card, layouts = found["card"], found["layouts"]
    head = f"{found['model']} on {found['gpus']} {card['name']} of {card['memory_gib']:.1f} GiB: "
    if not layouts:
        return head + _nothing_fits(found)
    known = "tokens_per_second" in layouts[0]
    why = found.get("estimate_missing")
    order = "by estimated tokens/s" if known else "nothing computed twice first, then the least model parallelism"
    lines = [f"{head}{len(layouts)} layouts fit, {order}"]
    if found["pinned"]:
        lines.append(f"  pinned by the command line: {_pins(found)}")
    if why:
        lines.append(f"  speed not estimated: {why}")
    for layout in layouts[:most]:
        settings = _settings(layout)
        speed = ""
        if known:
            rate = f"{_two(layout['tokens_per_second']):>10} tokens/s +-{layout['estimate_error']:.0%}"
            speed = f"  {rate}  {layout['limited_by']:<17}"
        lines.append(f"  {layout['memory_gib']:>7.2f} GiB{speed}  {settings}")
    if known:
        lines.append("  +-: by which estimates may be off (tools/records/README.md); smaller differences may be none")
    return "\n".join(lines)


def _pins(found: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in found["pinned"].items())


def _settings(layout: dict[str, Any]) -> str:
    """As overrides; names of settings have a dot."""
    return " ".join(f"{key}={value}" for key, value in layout.items() if "." in key)


def _nothing_fits(found: dict[str, Any]) -> str:
    """What a layout needs at least, which that is, and which pin keeps what would fit away."""
    near = found["nearest"]
    needs = (
        f"the least that a layout needs is {near['memory_gib']:.2f} GiB of a GPU, {near['short_gib']:.2f} GiB more "
        "than is usable"
    )
    nearest = f"  the nearest: {_settings(near)}"
    if not found["pinned"]:
        return f"nothing fits ({needs}); more GPUs, or a smaller model\n{nearest}"
    lines = [f"nothing fits with what the command line pins ({needs})", nearest]
    for name, count in found["layouts_without_pin"].items():
        what = f"{count:,d} layouts fit" if count else "nothing fits either"
        lines.append(f"  without {name}={found['pinned'][name]}: {what}")
    if not any(found["layouts_without_pin"].values()):
        lines.append("  leave several of them out, take more GPUs or a smaller model")
    return "\n".join(lines)


# row of a comparison -> (value of a plan, how it is written)
_ROWS: dict[str, tuple[Callable[[dict[str, Any]], float | None], str, float]] = {
    "active parameters (M)": (lambda plan: plan["active_params"], ",.1f", 1e6),
    "gating tables (M)": (lambda plan: plan["gate_table_params"], ",.1f", 1e6),
    "MFLOP a token, forward+backward": (lambda plan: plan["flops_per_token_forward_backward"], ",.1f", 1e6),
    "KV cache, bytes a token": (lambda plan: plan["kv_cache"]["this model"]["bytes_per_token"], ",.0f", 1),
    "memory of a GPU (GiB)": (lambda plan: plan.get("memory_per_rank_bytes", {}).get("total"), ",.2f", _GIB),
    "sent by a rank in a step (MiB)": (lambda plan: _total_sent(plan), ",.1f", _MIB),
    "step (ms, estimated)": (lambda plan: _estimated(plan, "step_s"), ",.1f", 1e-3),
    "tokens/s (estimated)": (lambda plan: _estimated(plan, "tokens_per_second"), ",.0f", 1),
    "MFU (%, estimated)": (lambda plan: _estimated(plan, "mfu"), ",.1f", 1e-2),
    "whole run (days, estimated)": (lambda plan: plan.get("budget", {}).get("days"), ",.2f", 1),
    "whole run (GPU-hours)": (lambda plan: plan.get("budget", {}).get("gpu_hours"), ",.0f", 1),
    "whole run (cost)": (lambda plan: plan.get("budget", {}).get("cost"), ",.0f", 1),
}


def _estimated(plan: dict[str, Any], key: str) -> float | None:
    return (plan.get("estimate") or {}).get(key)


def _total_sent(plan: dict[str, Any]) -> float | None:
    if "sent_per_step_and_rank" not in plan:
        return None
    return sum(each["sent_bytes"] for each in plan["sent_per_step_and_rank"])


def format_comparison(compared: dict[str, Any]) -> str:
    """Two plans side by side, and the second over the first."""
    plans = list(compared["plans"].items())
    (first, one), (second, two) = plans[0], plans[-1]  # one, where a configuration is compared with itself
    width = max(14, len(first), len(second))
    lines = [f"{'':<34} {first:>{width}} {second:>{width}}  second/first"]
    for name, (value, form, unit) in _ROWS.items():
        pair = [value(one), value(two)]
        if all(each is None for each in pair):
            continue
        cells = " ".join(f"{'-' if each is None else format(each / unit, form):>{width}}" for each in pair)
        lines.append(f"{name:<34} {cells}  {_ratio(pair):>12}")
    limits = [_estimated(plan, "limited_by") for plan in (one, two)]
    if any(limits):
        lines.append(f"{'limited by':<34} " + " ".join(f"{each or '-'!s:>{width}}" for each in limits))
        errors = sorted({f"{plan['estimate_error']:.0%}" for plan in (one, two) if plan.get("estimate")})
        lines.append(f"Estimates give or take {' and '.join(errors)}; what is common to both cancels in the ratio.")
    return "\n".join(lines)


def _ratio(pair: Iterable[float | None]) -> str:
    first, second = pair
    return f"{second / first:.3f}" if first and second is not None else "-"
