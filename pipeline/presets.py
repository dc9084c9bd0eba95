"""From names, files and command-line values to one checked RunConfig, or to every problem at once.

Precedence, lowest first: the models' defaults, the workload file, the preset files from left to
right, the command line.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import PositiveFloat, ValidationError

from pipeline.config import FIELDS, Frozen, Label, RunConfig
from pipeline.errors import ConfigError
from pipeline.layers import Finding, Layer, Problems, read_layer, unknown
from pipeline.merge import check_contradictions, merge
from pipeline.paths import is_file, names
from pipeline.reserved import where_it_belongs

COMMAND_LINE = "command line"
_WORDS = ("name", "summary", "why")


def resolve(
    preset: str,
    workload: str,
    overrides: Mapping[str, Any],
    look: Callable[[RunConfig], Iterable[Finding]] = lambda _: (),
) -> RunConfig:
    """Return the configuration of one run.

    `preset` is a name, a file, or several of these joined by `+`; `workload` a name or a file;
    `overrides` come from the command line and may be text. `look` finds more problems in what came
    of it; those of settings that were refused or could not be read are not told. Raises
    ConfigError.
    """
    problems = Problems()
    parts = _parts(preset, problems)
    base = _workload(workload, parts, problems)
    unread = set(FIELDS) - set(overrides) if problems.found else set()
    check_contradictions(parts, problems)
    _unknown_keys(base, (*_WORDS,), problems)
    for part in parts:
        _unknown_keys(part, (*_WORDS, "workload"), problems)
    _unknown_keys(Layer(COMMAND_LINE, overrides), (), problems)
    groups, refused = merge([base, *parts, Layer(COMMAND_LINE, overrides)], problems)
    config = RunConfig(
        preset=_label([layer.values for layer in parts], preset),
        workload_name=str(base.values.get("name", Path(workload).stem)),
        workload=groups["workload"],
        training=groups["training"],
        measurement=groups["measurement"],
    )
    for finding in look(config):
        if not (unread | refused).intersection(finding.settings):
            problems.add(finding.problem)
    problems.raise_any()
    return config


def asked_for(preset: str, key: str) -> str | None:
    """Return what a preset's files say on this key: of an earlier run's, also the workload."""
    said = [part.values.get(key) for part in _parts(preset, Problems())]
    return next((str(value) for value in reversed(said) if value), None)


def _split(preset: str) -> list[str]:
    """Return the names of a stack; the path of a file may hold a `+` of its own."""
    return [preset] if is_file(preset) else [name.strip() for name in preset.split("+")]


def _parts(preset: str, problems: Problems) -> list[Layer]:
    return [read_layer("presets", name, problems) for name in _split(preset)]


def _workload(name: str, parts: Sequence[Layer], problems: Problems) -> Layer:
    asked_by_preset = any(part.values.get("workload") == name for part in parts)
    if asked_by_preset and name not in names("workloads"):
        # The file of an earlier run holds all settings; of the workload only the name is missing.
        return Layer(name, {"name": name})
    return read_layer("workloads", name, problems)


class Reference(Frozen):
    """Figures of the same rows from elsewhere; only their change from row to row compares."""

    source: str
    memory_mib: tuple[PositiveFloat, ...]
    samples_per_second: tuple[PositiveFloat, ...]


class Ladder(NamedTuple):
    """Presets to compare, in order."""

    name: str
    presets: Sequence[str]
    reference: Reference | None = None


def ladder(name: str) -> Ladder:
    """Return a ladder of this name or in this file, or the presets of a list with commas.

    Raises ConfigError.
    """
    if name not in names("ladders") and not _is_ladder(name):
        presets = [preset.strip() for preset in name.split(",")]
        return Ladder(name, presets)
    problems = Problems()
    layer = read_layer("ladders", name, problems)
    problems.raise_any()
    rows = layer.values.get("presets")
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"{layer.place}: presets: a list of presets is needed")
    presets = [str(row) for row in rows]
    return Ladder(Path(name).stem, presets, _reference(layer, len(presets)))


def _is_ladder(name: str) -> bool:
    is_yaml = name.endswith((".yaml", ".yml")) and is_file(name)
    return is_yaml and "presets" in read_layer("ladders", name, Problems()).values


def _reference(layer: Layer, rows: int) -> Reference | None:
    values = layer.values.get("reference")
    if values is None:
        return None
    try:
        reference = Reference.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(("reference", *map(str, first["loc"])))
        raise ConfigError(f"{layer.place}: {key}: {first['msg']}") from error
    for key in ("memory_mib", "samples_per_second"):
        if len(getattr(reference, key)) != rows:
            raise ConfigError(f"{layer.place}: reference.{key}: {rows} figures are needed")
    return reference


def _unknown_keys(layer: Layer, more: Sequence[str], problems: Problems) -> None:
    allowed = [*FIELDS, "effective_batch", *more]
    known = (
        [*FIELDS, "effective_batch", "preset", "workload"]
        if layer.place == COMMAND_LINE
        else allowed
    )
    for key in map(str, layer.values):
        if key not in allowed:
            subject = f"{layer.place}: unknown key {key!r}"
            belongs = where_it_belongs(key)
            problems.add(f"{subject}: {belongs}" if belongs else unknown(subject, key, known))


def _label(parts: Sequence[Mapping[str, Any]], preset: str) -> Label:
    texts = {
        word: (" + " if word == "summary" else "\n").join(
            str(p[word]) for p in parts if p.get(word)
        )
        for word in ("summary", "why")
    }
    stems = [
        str(part.get("name") or Path(name).stem)
        for part, name in zip(parts, _split(preset), strict=True)
    ]
    return Label(name="+".join(stems), **texts)
