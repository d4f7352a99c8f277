"""A whole run: plan, parts, merge, summary. Interrupted at any moment, the same command goes on."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from egmla_megatron.errors import UserError
from egmla_megatron.preprocess.disk import writing_to
from egmla_megatron.preprocess.options import Options, check_options
from egmla_megatron.preprocess.outputs import MOVING, merge_parts, merge_settings, prefix_of, written_prefixes
from egmla_megatron.preprocess.part import part_file, read_record
from egmla_megatron.preprocess.plan import Plan, make_plan
from egmla_megatron.preprocess.pool import convert_parts
from egmla_megatron.preprocess.sources import find_sources
from egmla_megatron.preprocess.summary import LICENCE, describe_inputs, describe_result, is_climbmix
from egmla_megatron.preprocess.vocabulary import find_vocabulary

__all__ = ["preprocess"]

_PLAN = "plan.json"


def preprocess(options: Options) -> None:
    """Writes the data sets that `options` asks for; prints what it takes the inputs for and a summary.

    Raises:
        UserError: options, inputs or disk do not allow it.
        WorkerDiedError: a worker process was killed or failed.
    """
    check_options(options)
    sources, skipped = find_sources(options)
    if options.by_cluster and not any(source.cluster_column for source in sources):
        raise UserError(
            "--by-cluster: no input has a column cluster_id of whole numbers, allowed inputs that do; leave it out"
        )
    vocabulary = find_vocabulary(options, has_text=any(source.kind == "text" for source in sources))
    plan = make_plan(options, sources, vocabulary)
    folder = options.output.with_name(options.output.name + ".parts")
    if options.shard == 0:
        if is_climbmix(sources):
            print(LICENCE)
        print(describe_inputs(plan))
    with writing_to(options.output):
        if _is_complete(plan, options):
            shutil.rmtree(folder, ignore_errors=True)  # left when a run was killed at its very end
            print(f"{options.output}: already complete")
            return
        _prepare(plan, options, folder)
        with _locked(folder / f"task{options.shard}-of-{options.shards}.lock", wait=False):
            started = time.perf_counter()
            _convert(plan, options, folder)
            converted = time.perf_counter() - started
        missing = _unfinished(plan, range(len(plan.parts)), folder)
        if missing:
            print(f"{len(missing)} of {len(plan.parts)} parts are left to other tasks; the last one merges")
            return
        _merge(plan, options, folder, skipped, converted)


def _manifest(prefix: Path) -> dict[str, Any] | None:
    """PREFIX.json, None where there is none or it is not of this tool."""
    try:
        found = json.loads(Path(f"{prefix}.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) and "preprocess" in found else None


def _is_complete(plan: Plan, options: Options) -> bool:
    """True when these very outputs exist: another task made them, or a run was killed when all but done.

    Raises:
        UserError: outputs exist and --overwrite is not given.
    """
    found = written_prefixes(options.output)
    folder = options.output.with_name(options.output.name + ".parts")
    manifest = _manifest(options.output)
    wanted = {"plan": plan.digest, **merge_settings(options)}
    same = manifest is not None and wanted.items() <= manifest["preprocess"].items()
    if same and (folder.exists() or options.shards > 1):
        return True
    if found and not options.overwrite and not _was_moving(folder, options):
        files = ", ".join(f"{prefix}.*" for prefix in found)
        raise UserError(f"--output-prefix: {files} exist, expected nothing there; use --overwrite or another prefix")
    return False


def _was_moving(folder: Path, options: Options) -> bool:
    """True when a run with the same merge settings was killed while it put these outputs into place."""
    try:
        return json.loads((folder / MOVING).read_text(encoding="utf-8")) == merge_settings(options)
    except (FileNotFoundError, ValueError):
        return False


def _prepare(plan: Plan, options: Options, folder: Path) -> None:
    """Makes the folder of parts, or checks that the one there belongs to this plan."""
    path = folder / _PLAN
    if path.is_file():
        theirs = json.loads(path.read_text(encoding="utf-8"))
        differing = [key for key in plan.facts if theirs.get(key) != json.loads(json.dumps(plan.facts[key]))]
        if differing and not (options.overwrite and options.shards == 1):
            key = differing[0]
            got, there = (plan.facts[key], theirs.get(key)) if key != "inputs" else ("others", "as listed in it")
            fix = "give the same options again, or --overwrite" if options.shards == 1 else "delete that folder"
            raise UserError(f"{folder} holds shards of another run: {key}: got {got}, allowed {there} ({path}); {fix}")
        if differing:
            shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{_PLAN}.{os.getpid()}.tmp"
    partial.write_text(json.dumps(plan.facts, indent=1) + "\n", encoding="utf-8")
    partial.rename(path)


@contextmanager
def _locked(path: Path, *, wait: bool) -> Iterator[None]:
    """Holds a lock that ends with the process, however it ends. UserError when it is taken and wait is false."""
    with path.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise UserError(
                f"{path}: another process is at this task, expected none; wait for it or stop it"
            ) from error
        yield


def _unfinished(plan: Plan, numbers: Iterator[int] | range, folder: Path) -> list[int]:
    """Parts that are not there, or were made with faults skipped although faults are to stop the run."""
    missing = []
    for number in numbers:
        record = read_record(folder, number)
        faulty = record is not None and any(found.get("faults") for found in record["sources"].values())
        if record is None or (faulty and plan.on_error == "stop"):
            missing.append(number)
    return missing


def _convert(plan: Plan, options: Options, folder: Path) -> None:
    from tqdm import tqdm

    if options.shards == 1:
        for stale in folder.glob("*.tmp"):
            stale.unlink()
    mine = range(options.shard, len(plan.parts), options.shards)
    todo = _unfinished(plan, mine, folder)
    if len(todo) < len(mine):
        print(f"{len(mine) - len(todo)} of {len(mine)} parts are there already")
    total = sum(plan.parts[number].bytes for number in todo)
    done: dict[int, tuple[int, int]] = {}
    started = time.perf_counter()
    with tqdm(total=total or None, unit="B", unit_scale=True, disable=None, desc="parts", file=sys.stderr) as bar:

        def report(number: int, input_bytes: int, tokens: int) -> None:
            done[number] = input_bytes, max(tokens, done.get(number, (0, 0))[1])
            bar.n = sum(entry[0] for entry in done.values())
            rate = sum(entry[1] for entry in done.values()) / (time.perf_counter() - started)
            bar.set_postfix_str(f"{rate / 1e6:.2f}M tokens/s", refresh=False)
            bar.update(0)

        convert_parts(plan, todo, folder, options.workers, report)
        bar.refresh()


def _merge(plan: Plan, options: Options, folder: Path, skipped: list[str], converted: float) -> None:
    """converted: seconds that this run spent on parts, for the summary."""
    from tqdm import tqdm

    started = time.perf_counter()
    with _locked(folder / "merge.lock", wait=True):
        if not (folder / _PLAN).exists() and _is_complete(plan, options):
            print(f"{options.output}: another task has merged it")
            return
        total = sum(part_file(folder, part.number, "bin").stat().st_size for part in plan.parts)
        with tqdm(total=total, unit="B", unit_scale=True, disable=None, desc="merging", file=sys.stderr) as bar:
            manifest = merge_parts(plan, options, folder, skipped, bar.update)
        shutil.rmtree(folder)
    seconds = {"parts": converted, "merging": time.perf_counter() - started}
    print(describe_result(manifest, options, _manifest(prefix_of(options.output, "val")), seconds))
