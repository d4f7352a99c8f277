"""Reads a run configuration: YAML files, their includes, and `section.key=value` from the command line.

Later wins: the includes of a file in their order, then the file itself, then the overrides. Every value
remembers where it came from, so that a mistake is reported at the place where it was written.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import yaml

from egmla_megatron.config.architecture import architecture, architecture_difference
from egmla_megatron.config.check_switches import graph_obstacles
from egmla_megatron.config.schema import RunConfig
from egmla_megatron.config.values import convert
from egmla_megatron.environment import gpu_count
from egmla_megatron.errors import UserError

__all__ = [
    "architecture",
    "architecture_difference",
    "dump_yaml",
    "from_dict",
    "load_config",
    "overridden",
    "to_dict",
]

_CONFIGS = Path(__file__).resolve().parents[2] / "configs"
_NAMED_FOLDERS = ("run", "model")
_SECTIONS: dict[str, type] = get_type_hints(RunConfig)
_GRAPH = ("train", "cuda_graph")  # a bool, for which files and overrides may also say auto


class _Value(NamedTuple):
    value: Any
    origin: str  # file or override it was written in


_Values = dict[tuple[str, str], _Value]


class _TextLoader(yaml.BaseLoader):
    """Keeps every scalar as text and refuses a key that stands twice in one mapping."""


def _mapping_without_duplicates(loader: _TextLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    result: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is no name", key_node.start_mark)
        if key in result:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} stands twice", key_node.start_mark)
        result[key] = loader.construct_object(value_node, deep=True)
    return result


_TextLoader.add_constructor("tag:yaml.org,2002:map", _mapping_without_duplicates)


def load_config(path: str | Path, overrides: Sequence[str] = (), *, gpu: bool | None = None) -> RunConfig:
    """Returns the configuration in `path` with `overrides` applied.

    `path` is a YAML file, or the bare name of one in configs/run or configs/model. Each override reads
    `section.key=value`. `train.cuda_graph: auto` becomes true where the run has a GPU and nothing rules it out; `gpu`
    says whether it has one, None: as the driver of this machine does. Raises UserError for a missing or empty file,
    one without a model, an unknown section or key, or a wrong type.
    """
    found = _find(path)
    values = _read_file(found, ())
    for override in overrides:
        values.update([_parse_override(override)])
    automatic = _take_auto(values)
    config = _build(values)
    if not any(section == "model" for section, _ in values):  # or the default model would be trained unasked
        raise UserError(
            f"{found}: got no section model, neither in it nor in its includes; allowed: a file that says what to "
            "build; include one of configs/model, or give model.KEY=VALUE"
        )
    return _choose_graph(config, gpu) if automatic else config


def overridden(overrides: Sequence[str]) -> dict[str, Any]:
    """Returns what the overrides set: section.key -> text or list, unchecked. Raises UserError for one that is none."""
    parsed = dict(_parse_override(override) for override in overrides)
    return {f"{section}.{key}": given.value for (section, key), given in parsed.items()}


def _take_auto(values: _Values) -> bool:
    """Whether `train.cuda_graph` is auto, which is taken out of `values`: it depends on the others.

    Raises:
        UserError: it is none of the three that it may be.
    """
    asked = values.get(_GRAPH)
    if asked is None:
        return False
    if isinstance(asked.value, str) and asked.value.lower() == "auto":
        del values[_GRAPH]
        return True
    try:
        convert(asked.value, bool)
    except ValueError as error:
        raise UserError(f"{asked.origin}: train.cuda_graph: got {asked.value!r}; allowed: true, false, auto") from error
    return False


def _choose_graph(config: RunConfig, gpu: bool | None) -> RunConfig:
    """The driver is asked only where its answer decides."""
    graph = not graph_obstacles(config) and (gpu_count() > 0 if gpu is None else gpu)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, cuda_graph=graph))


def from_dict(data: Mapping[str, Mapping[str, Any]], origin: str = "configuration") -> RunConfig:
    """Inverse of `to_dict`; missing sections and keys take their defaults.

    Raises UserError like `load_config`, also for auto as `train.cuda_graph`: what was loaded holds what was chosen.
    """
    return _build(_flatten(data, origin))


def to_dict(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Returns the configuration as plain dicts, lists, texts and numbers, fit for JSON and YAML."""
    sections = {name: dataclasses.asdict(getattr(config, name)) for name in _SECTIONS}
    return {
        name: {key: list(value) if isinstance(value, tuple) else value for key, value in section.items()}
        for name, section in sections.items()
    }


def dump_yaml(config: RunConfig) -> str:
    """Returns YAML that `load_config` reads back to an equal configuration, on any machine."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, width=120)


def _find(path: str | Path) -> Path:
    """Resolves a path or a bare name. Raises UserError with the nearest known names."""
    candidate = Path(path)
    if candidate.is_file():
        return candidate
    is_bare = len(candidate.parts) == 1
    if is_bare:
        for folder in _NAMED_FOLDERS:
            named = _CONFIGS / folder / (candidate.name.removesuffix(".yaml") + ".yaml")
            if named.is_file():
                return named
    known = sorted({file.stem for folder in _NAMED_FOLDERS for file in (_CONFIGS / folder).glob("*.yaml")})
    near = difflib.get_close_matches(candidate.stem, known, n=3)
    names = f"nearest: {', '.join(near)}" if near else f"names: {', '.join(known)}"
    what = f"configuration {str(path)!r} is {'a folder' if candidate.is_dir() else 'not there'}"
    raise UserError(f"{what}; allowed: a YAML file, or a name from configs/run or configs/model; {names}")


def _read_file(path: Path, including: tuple[Path, ...]) -> _Values:
    """Returns the values of one file over those of its includes. Raises UserError on cycles and bad YAML."""
    resolved = path.resolve()
    if resolved in including:
        chain = " -> ".join(str(file) for file in (*including, resolved))
        raise UserError(f"include cycle: {chain}; remove one of these includes")
    data = _parse_yaml(path)
    includes = data.pop("include", [])
    if not isinstance(includes, (list, str)):
        raise UserError(f"{path}: include: got {includes!r}; allowed: a list of YAML paths relative to this file")
    values: _Values = {}
    for name in [includes] if isinstance(includes, str) else includes:
        included = path.parent / str(name)
        if not included.is_file():
            raise UserError(f"{path}: include {name!r} is not there; paths are relative to this file")
        values.update(_read_file(included, (*including, resolved)))
    values.update(_flatten(data, str(path)))
    return values


def _parse_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_TextLoader)  # a BaseLoader: builds no objects
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as UTF-8 text: {error}") from error
    if data is None or data == "":
        raise UserError(f"{path} is empty; allowed: sections {', '.join(_SECTIONS)} and include; write at least one")
    if not isinstance(data, dict):
        raise UserError(f"{path}: got a {type(data).__name__}; allowed: sections {', '.join(_SECTIONS)} and include")
    return data


def _flatten(data: Mapping[str, Any], origin: str) -> _Values:
    """Turns section mappings into one flat dict; sections are checked here, keys in `_build`."""
    values: _Values = {}
    for section, content in data.items():
        _known(section, list(_SECTIONS), "section", origin)
        if content is None or content == "":
            continue  # a section with all its keys commented out
        if not isinstance(content, Mapping):
            raise UserError(f"{origin}: section {section}: got {content!r}; allowed: keys with values below it")
        values.update({(section, str(key)): _Value(value, origin) for key, value in content.items()})
    return values


def _parse_override(text: str) -> tuple[tuple[str, str], _Value]:
    name, equals, raw = text.partition("=")
    section, dot, key = name.strip().partition(".")
    origin = f"override {text!r}"
    if not (equals and dot and section and key):
        raise UserError(f"{origin}: allowed: section.key=value, for example train.steps=100")
    raw = raw.strip()
    if raw[:1] not in ("[", "'", '"'):
        return (section, key), _Value(raw, origin)  # taken as it stands: "#", ":" and "*" are no syntax here
    try:
        return (section, key), _Value(yaml.load(raw, Loader=_TextLoader), origin)
    except yaml.YAMLError as error:
        raise UserError(f"{origin}: the list or the quotes do not close") from error


def _build(values: _Values) -> RunConfig:
    """Converts every value to its field's type and makes the dataclasses."""
    sections: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    for (section, key), (value, origin) in values.items():
        _known(section, list(_SECTIONS), "section", origin)
        hints = get_type_hints(_SECTIONS[section])
        _known(key, list(hints), f"key in section {section}", origin)
        try:
            sections[section][key] = convert(value, hints[key])
        except ValueError as error:
            raise UserError(f"{origin}: {section}.{key}: got {value!r}; allowed: {error}") from error
    return RunConfig(**{name: kind(**sections[name]) for name, kind in _SECTIONS.items()})


def _known(name: str, allowed: Sequence[str], what: str, origin: str) -> None:
    """Raises UserError naming the nearest allowed name when `name` is none of them."""
    if name in allowed:
        return
    near = difflib.get_close_matches(str(name), allowed, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(allowed)}"
    raise UserError(f"{origin}: unknown {what}: {name!r}; {hint}")
