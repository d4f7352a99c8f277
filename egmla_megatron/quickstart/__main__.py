"""The whole path on real text: data, training, kill, resume, evaluation, export, check, generation, report.

`bash launch/quickstart.sh [--out DIR]` calls it. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from egmla_megatron.checkpoint.manifest import find_checkpoint
from egmla_megatron.cli import CommandParser, run_main
from egmla_megatron.config.check import check_config
from egmla_megatron.config.load import load_config
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.config.workable import refuse
from egmla_megatron.data.documents import check_document_options
from egmla_megatron.environment import whole_number
from egmla_megatron.errors import UserError
from egmla_megatron.folders import refuse_name, refuse_unwritable
from egmla_megatron.quickstart.supervise import Launch, read_events, resume_difference, run_training
from egmla_megatron.quickstart.text import VOCAB_SIZE, QuickstartData, prepare_text
from egmla_megatron.quiet import quiet_libraries
from egmla_megatron.train.machine import check_machine

CONFIG = "quickstart"
MARKER = "quickstart.json"  # says that the folder is a quickstart's, which a new quickstart may replace
TABLE_COLUMNS = 64  # model.kv_emb_dim of configs/model/quickstart.yaml
OWN = ("run.dir", "data.train", "data.valid", "data.tokenizer")  # settings that follow from --out
STEPS_TO_REPEAT = 8  # steps after the checkpoint that are computed twice, to compare
PROMPTS = ("def __init__(self, ", "import os\n", '"""Return the ')


def _open_folder(out: Path) -> Path:
    """The output folder; a former quickstart's run in it is replaced, its data kept.

    Raises:
        UserError: the folder holds something else.
    """
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / MARKER).is_file())):
        raise UserError(f"--out: {out} is there and is not a former quickstart's folder; choose another")
    out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).write_text(json.dumps({"started_unix_s": time.time()}))
    if (out / "run").exists():
        print(f"replacing the run of a former quickstart in {out}")
        shutil.rmtree(out / "run")
    return out


def _layout() -> tuple[int, list[str]]:
    """(ranks, overrides): EGMLA_NPROC ranks; without it two on a CPU, or the GPUs that are there up to four."""
    wanted = whole_number("EGMLA_NPROC", 0, 1)
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = wanted or (2 ** int(math.log2(min(4, gpus))) if gpus else 2)
    if 0 < gpus < ranks:
        raise UserError(f"EGMLA_NPROC: got {ranks}, allowed a whole number from 1 to {gpus}, the GPUs; lower it")
    # tables are cut into as many equal parts as the ranks and their 64 columns allow
    shared = [f"parallel.gate_group={math.gcd(ranks, TABLE_COLUMNS)}"]
    return ranks, [*shared, "run.deterministic=true"] if gpus else shared


def _train(out: Path, data: QuickstartData, extra: list[str]) -> tuple[list[dict[str, Any]], int, float]:
    """Train, kill in the middle, resume; returns (events, repeated steps, largest difference of their losses)."""
    ranks, layout = _layout()
    run_dir = out / "run"
    named = [
        f"run.dir={run_dir}",
        f"data.train=[{json.dumps(str(data.train))}]",
        f"data.valid=[{json.dumps(str(data.valid))}]",
        f"data.tokenizer={data.tokenizer}",
    ]
    overrides = [*named, *layout, *extra]
    cfg = load_config(CONFIG, overrides)
    launch = Launch(ranks, CONFIG, overrides, run_dir, out / "train.log")
    launch.log.write_bytes(b"")
    print(f"training: {cfg.total_steps} steps on {ranks} ranks, gating tables sharded over {cfg.parallel.gate_group}")
    kill_at = cfg.checkpoint.interval_steps + STEPS_TO_REPEAT
    run_training(launch, cfg.total_steps, "train", kill_at=kill_at)
    print("killed in the middle (SIGKILL); resuming from the newest complete checkpoint")
    run_training(launch, cfg.total_steps, "resume")
    events = read_events(run_dir)
    repeated, difference = resume_difference(events)
    return events, repeated, difference


def _export(out: Path, data: QuickstartData) -> tuple[Path, float, list[str]]:
    """(Hugging Face folder, largest difference of its logits to megatron-core's, three continuations)."""
    import torch

    from egmla_megatron.convert.command import Export, convert_to_hf
    from egmla_megatron.inference.generate import Sampling, generate, load_exported

    hf_dir = out / "run" / "hf"
    compared = convert_to_hf(out / "run", hf_dir, Export(tokenizer=str(data.tokenizer), verify=True))
    assert compared is not None
    exported, tokenizer = load_exported(hf_dir, dtype=torch.float32)
    texts = generate(exported, tokenizer, PROMPTS, Sampling(max_new_tokens=48))
    samples = [prompt + continuations[0] for prompt, continuations in zip(PROMPTS, texts, strict=True)]
    return hf_dir, compared.max_abs, samples


def _result(out: Path, extra: list[str]) -> dict[str, Any]:
    import torch

    from egmla_megatron.report.read import read_run
    from egmla_megatron.report.summary import summarize
    from egmla_megatron.report.write import write_report

    data = prepare_text(out / "data")
    events, repeated, difference = _train(out, data, extra)
    print("exporting to Hugging Face, checking and sampling")
    hf_dir, logit_difference, samples = _export(out, data)
    report = write_report(out / "run")
    summary = summarize(read_run(out / "run"))
    steps = [event for event in events if event["kind"] == "step"]
    evaluation = [event for event in events if event["kind"] == "eval"][-1]
    tolerance = 1e-3 if torch.cuda.is_available() else 0.0  # on a CPU to the last bit
    return {
        "train_loss_first": steps[0]["loss"],
        "train_loss_last": steps[-1]["loss"],
        "val_loss": evaluation["val_loss"],
        "val_ppl": evaluation["val_ppl"],
        "tokens_per_second": events[-1]["tokens_per_second"],
        "peak_memory_mib": summary.peak_memory_mib,
        "resume_matches": repeated > 0 and difference <= tolerance,
        "hf_logit_max_abs_diff": logit_difference,
        "hf_dir": str(hf_dir),
        "report": str(report),
        "samples": samples,
    }


def _check(out: str, overrides: list[str]) -> None:
    """Everything that can be wrong with the command line, before anything is replaced.

    Raises:
        UserError: names it.
    """
    refuse_name("--out", out)
    refuse_unwritable("--out", out)
    for override in overrides:
        name = override.partition("=")[0].strip()
        if name in OWN:
            raise UserError(f"{name}: got {override!r}, but the quickstart makes its own; choose the folder with --out")
    ranks, layout = _layout()
    cfg = load_config(CONFIG, [*layout, *overrides])
    check_config(cfg, ranks)
    check_document_options(cfg)
    check_machine(cfg)
    if cfg.data.cache_dir:
        refuse_name("data.cache_dir", cfg.data.cache_dir)
        refuse_unwritable("data.cache_dir", cfg.data.cache_dir)
    if cfg.checkpoint.load:
        find_checkpoint(Path(cfg.checkpoint.load))
    _check_story(cfg)


def _check_story(cfg: RunConfig) -> None:
    """What the quickstart itself needs of settings that are fine for other runs.

    Raises:
        UserError: names the setting.
    """
    if cfg.model.vocab_size < VOCAB_SIZE:
        allowed = f"at least {VOCAB_SIZE}, the pieces of the quickstart's tokenizer"
        refuse("model.vocab_size", cfg.model.vocab_size, allowed, f"set model.vocab_size={VOCAB_SIZE}")
    if cfg.checkpoint.resume != "auto":
        what = "checkpoint.resume: the quickstart starts anew, is killed and resumes"
        refuse(what, cfg.checkpoint.resume, "auto", "leave it out")
    every, last = cfg.checkpoint.interval_steps, cfg.total_steps - STEPS_TO_REPEAT - 1
    if not 1 <= every <= last:
        refuse(
            f"checkpoint.interval_steps: the quickstart kills the training {STEPS_TO_REPEAT} steps after a checkpoint",
            f"{every} in a run of {cfg.total_steps} steps",
            f"1 to {last}" if last >= 1 else "a longer run",
            f"set checkpoint.interval_steps={max(1, last // 2)}" + ("" if last >= 1 else " and train.steps=50"),
        )
    if cfg.train.exit_after_steps:
        refuse(
            "train.exit_after_steps: the quickstart trains to the end", cfg.train.exit_after_steps, "0", "leave it out"
        )


def main() -> int:
    """Returns the exit code: 0, or 1 when a check of the result failed."""
    parser = CommandParser(prog="launch/quickstart.sh", description=__doc__)
    parser.add_argument("--out", default="runs/quickstart", help="folder to write to (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings, as for the trainer")
    arguments = parser.parse_intermixed_args()
    quiet_libraries()
    _check(arguments.out, arguments.overrides)
    with contextlib.redirect_stdout(sys.stderr):  # stdout carries the result alone
        out = _open_folder(Path(arguments.out))
        result = _result(out.resolve(), arguments.overrides)
        for sample in result["samples"]:
            print("-" * 40 + f"\n{sample}")
        print("-" * 40)
    print(json.dumps(result))
    return 0 if result["resume_matches"] and result["hf_logit_max_abs_diff"] < 1e-3 else 1


if __name__ == "__main__":
    run_main(main)
