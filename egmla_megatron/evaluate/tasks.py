"""Tasks of EleutherAI's lm_eval on a checkpoint or an exported folder, by the exported model in one process.

Whether a beginning-of-sequence token stands before each text changes LAMBADA by orders of magnitude, so what really
happened is recorded beside the scores, not what was asked for.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from egmla_megatron.checkpoint.manifest import find_checkpoint, read_manifest
from egmla_megatron.cli import check_count
from egmla_megatron.convert.command import Export, convert_to_hf
from egmla_megatron.errors import UserError

__all__ = ["TaskOptions", "TaskRun", "TaskScore", "as_rows", "as_table", "load_tasks", "plan_tasks", "run_tasks"]

_PACKAGES = ("lm_eval", "accelerate", "peft")  # lm_eval's Hugging Face models import the other two
_DRAWS = 1000  # bootstrap samples behind the standard error of a perplexity
_CLOSE = 3  # names that are offered instead of an unknown one


@dataclass(frozen=True)
class TaskOptions:
    """What is run, and how."""

    names: tuple[str, ...]  # tasks, groups or tags of lm_eval, or the paths of YAML files
    include_path: str = ""  # folder with more tasks
    limit: int = 0  # documents of each task at most, 0: all
    num_fewshot: int | None = None  # None: as each task says
    batch_size: int = 8  # sequences
    device: str = ""  # empty: a GPU if there is one
    bos: str = "auto"  # token before each text: yes, no, auto (as the tokenizer does)
    tokenizer: str | None = None  # of a checkpoint; None: data.tokenizer of its run
    hf_dir: str = ""  # where a checkpoint's export is kept, empty: nowhere


@dataclass(frozen=True)
class TaskScore:
    """One metric of one task or group."""

    task: str
    metric: str
    filter: str  # what lm_eval does with answers before they are scored, usually none
    value: float
    stderr: float | None  # None: lm_eval knows none
    higher_is_better: bool | None
    samples: int | None  # documents; None: of a group
    few_shot: int | None  # examples before each question
    version: str  # of the task's definition


@dataclass(frozen=True)
class TaskRun:
    """What the scores were found with."""

    checkpoint: str | None  # None: an exported folder was given
    step: int | None  # optimizer steps of the checkpoint
    hf_dir: str | None  # None: the export was temporary
    bos_prepended: bool  # before every text that has a context
    empty_context_token: int  # id that stands in for a context that is empty
    max_length: int  # tokens; longer texts lose their beginning
    dtype: str
    device: str
    batch_size: int
    limit: int
    versions: dict[str, str]
    scores: tuple[TaskScore, ...]


def plan_tasks(where: str, options: TaskOptions, ranks: int) -> Path | None:
    """Everything that can be found wrong before lm_eval and the model are loaded.

    Returns:
        The checkpoint, None for an exported folder.

    Raises:
        UserError: lm_eval is not installed, several processes, numbers out of range, neither checkpoint nor export.
    """
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise UserError(
            f"tasks: got no package {', '.join(missing)}; install with: pip install 'lm-eval[hf]', or set "
            "EGMLA_EXTRAS=dev,eval for the launch scripts"
        )
    if ranks > 1:
        raise UserError(
            f"tasks: got {ranks} ranks (WORLD_SIZE), allowed 1: one process on one GPU; start it with python, or "
            "with launch/evaluate.sh"
        )
    check_count("--limit", options.limit, 0, 2**31 - 1)
    check_count("--num-fewshot", options.num_fewshot, 0, 1000)
    check_count("--batch-size", options.batch_size, 1, 65_536)
    if options.include_path and not Path(options.include_path).is_dir():
        raise UserError(f"--include-path: got {options.include_path}, allowed a folder with YAML files of tasks")
    if not (Path(where) / "config.json").is_file():
        checkpoint = find_checkpoint(Path(where))
        source = options.tokenizer or read_manifest(checkpoint).config["data"]["tokenizer"]
        if not source or not Path(source).exists():
            raise UserError(
                f"--tokenizer: got {source or 'none, as data.tokenizer of the run'}, allowed the folder or .model file "
                "of the training data's tokenizer; give it"
            )
        return checkpoint
    given = [name for name, value in (("--hf-dir", options.hf_dir), ("--tokenizer", options.tokenizer)) if value]
    if given:
        raise UserError(f"{given[0]}: {where} is an export already, allowed for checkpoints only; leave it out")
    return None


def load_tasks(options: TaskOptions) -> Any:
    """Definitions and data of all tasks, as lm_eval's TaskManager gives them; data may be fetched from the network.

    Raises:
        UserError: an unknown name; data that cannot be had.
    """
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    with contextlib.redirect_stdout(sys.stderr):
        manager = TaskManager(include_path=options.include_path or None, include_defaults=False)
        if not set(options.names) <= set(manager.all_subtasks):  # lm_eval's own 14,000 files take a while to read
            manager = TaskManager(include_path=options.include_path or None)
        for name in options.names:
            if name not in manager.all_tasks and not Path(name).is_file():
                close = difflib.get_close_matches(name, manager.all_tasks, _CLOSE)
                raise UserError(
                    f"--tasks: got {name!r}, allowed names of lm_eval{' such as ' + ', '.join(close) if close else ''} "
                    "(all: lm-eval ls tasks), of --include-path, or a YAML file"
                )
        try:
            return manager.load(list(options.names))
        except Exception as error:  # whatever it is, it lies in the task's files or on the way to its data
            raise UserError(
                f"--tasks: {', '.join(options.names)} cannot be loaded ({type(error).__name__}: {error}); without a "
                "network fetch the data first, on a machine that has one, into the same HF_HOME (--limit 1)"
            ) from error


def run_tasks(where: str, checkpoint: Path | None, tasks: Any, options: TaskOptions) -> TaskRun:
    """Scores of all tasks.

    Args:
        where: the exported folder, where there is no checkpoint.
        checkpoint: from `plan_tasks`.
        tasks: from `load_tasks`.

    Raises:
        UserError: no tokenizer, an incomplete export, a device that is not there, a BOS token that cannot be added.
    """
    with _exported(where, checkpoint, options) as folder:
        lm, own = _language_model(folder, options)
        prepended = _begins_with_bos(lm, options.bos)
        from lm_eval.evaluator import simple_evaluate
        from lm_eval.tasks import TaskManager

        with contextlib.redirect_stdout(sys.stderr):
            results = simple_evaluate(
                lm,
                tasks=[*tasks["groups"].values(), *_outside_groups(tasks)],
                num_fewshot=options.num_fewshot,
                limit=options.limit or None,
                log_samples=False,
                bootstrap_iters=_DRAWS,
                task_manager=TaskManager(include_defaults=False),  # all are loaded
            )
    return TaskRun(
        checkpoint=str(checkpoint) if checkpoint else None,
        step=read_manifest(checkpoint).step if checkpoint else None,
        hf_dir=(options.hf_dir or None) if checkpoint else where,
        bos_prepended=prepended,
        empty_context_token=int(lm.prefix_token_id),
        max_length=int(lm.max_length),
        dtype=str(own.dtype).removeprefix("torch."),
        device=str(own.device),
        batch_size=options.batch_size,
        limit=options.limit,
        versions={name: metadata.version(name) for name in ("lm_eval", "transformers", "torch")},
        scores=tuple(_scores(results)),
    )


@contextlib.contextmanager
def _exported(where: str, checkpoint: Path | None, options: TaskOptions) -> Iterator[Path]:
    if checkpoint is None:
        yield Path(where)
        return
    with tempfile.TemporaryDirectory(prefix="egmla-tasks-") as temporary, contextlib.redirect_stdout(sys.stderr):
        target = Path(options.hf_dir or Path(temporary, "hf"))
        # rows without a token would take part in every softmax
        convert_to_hf(checkpoint, target, Export(tokenizer=options.tokenizer, vocab_size="tokenizer"))
        yield target


def _language_model(folder: Path, options: TaskOptions) -> tuple[Any, Any]:
    """lm_eval's wrapper, and the model in it."""
    from lm_eval.models.huggingface import HFLM

    from egmla_megatron.inference.generate import load_exported

    model, tokenizer = load_exported(folder, device=options.device)
    if options.bos == "yes":
        _prepend_bos(tokenizer, folder)
    logger = logging.getLogger("lm_eval.models.huggingface")
    logger.setLevel(logging.ERROR)  # it warns that the model is loaded already
    add = {"auto": None, "yes": True, "no": False}[options.bos]
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=options.batch_size, add_bos_token=add)
    logger.setLevel(logging.WARNING)
    return lm, model


def _prepend_bos(tokenizer: Any, folder: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    bos = tokenizer.bos_token
    if bos is None:
        raise UserError(f"--bos yes: the tokenizer of {folder} has no bos_token, allowed auto or no; choose one")
    template = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = template


def _begins_with_bos(lm: Any, wanted: str) -> bool:
    """Whether lm_eval's own encoding of a text begins with BOS."""
    ids = lm.tok_encode("a")
    prepended = bool(ids) and ids[0] == lm.tokenizer.bos_token_id
    if wanted != "auto" and prepended != (wanted == "yes"):
        raise UserError(f"--bos: got {wanted}, but the tokenizer {'adds' if prepended else 'omits'} it; use auto")
    return prepended


def _outside_groups(tasks: Any) -> list[Any]:
    inside = {task.task_name for group in tasks["groups"].values() for task in group.get_all_tasks()}
    return [task for name, task in tasks["tasks"].items() if name not in inside]


def _scores(results: Mapping[str, Any]) -> Iterator[TaskScore]:
    """One for every metric in lm_eval's table; its keys are `metric,filter` and `metric_stderr,filter`."""
    for task, found in results["results"].items():
        for key, value in found.items():
            metric, _, name = key.partition(",")
            if not name or metric.endswith("_stderr"):
                continue
            stderr = found.get(f"{metric}_stderr,{name}")
            yield TaskScore(
                task=task,
                metric=metric,
                filter=name,
                value=float(value),
                stderr=None if isinstance(stderr, str) or stderr is None else float(stderr),
                higher_is_better=results["higher_is_better"].get(task, {}).get(metric),
                samples=results["n-samples"].get(task, {}).get("effective"),
                few_shot=results["n-shot"].get(task),
                version=str(results["versions"].get(task, "")),
            )


def as_rows(run: TaskRun) -> dict[str, Any]:
    """For --json."""
    return asdict(run)


def as_table(run: TaskRun) -> list[str]:
    """Lines of Markdown."""
    where = f"{run.checkpoint}, step {run.step}" if run.checkpoint else str(run.hf_dir)
    bos = "BOS before every text" if run.bos_prepended else "no BOS before the texts"
    lines = [
        f"{where}; lm_eval {run.versions['lm_eval']}, {bos}, {run.dtype} on {run.device}",
        "",
        "| task | metric | value | stderr | few-shot | documents | version |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for score in run.scores:
        metric = score.metric if score.filter == "none" else f"{score.metric} ({score.filter})"
        stderr = "" if score.stderr is None else f"{score.stderr:.4f}"
        counts = " | ".join("" if count is None else str(count) for count in (score.few_shot, score.samples))
        lines.append(f"| {score.task} | {metric} | {score.value:.4f} | {stderr} | {counts} | {score.version} |")
    return lines
