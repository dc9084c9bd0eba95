"""From names, files and command-line values to one checked RunConfig, or to every problem at once.

Precedence, lowest first: the models' defaults, the workload file, the preset files from left to
right, the command line.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from pipeline.config import FIELDS, GROUPS, Label, RunConfig
from pipeline.errors import ConfigError
from pipeline.paths import names, shipped
from pipeline.reserved import check_training_arguments

COMMAND_LINE = "command line"
_WORDS = ("name", "summary", "why")
_CHOICES = ("preset", "workload")


class Layer(NamedTuple):
    """Settings from one place, in the words of that place."""

    place: str
    values: Mapping[str, Any]


class Problems:
    """Collects what is wrong, so that the user reads it all at once."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, problem: str) -> None:
        """Note a problem, once."""
        if problem not in self.found:
            self.found.append(problem)

    def raise_any(self) -> None:
        """Raise if there were any."""
        if self.found:
            raise ConfigError(*self.found)


def resolve(preset: str, workload: str, overrides: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of one run.

    `preset` is a name, a file, or several of these joined by `+`; `workload` a name or a file;
    `overrides` come from the command line and may be text. Raises ConfigError.
    """
    problems = Problems()
    parts = [_read("presets", part.strip(), problems) for part in preset.split("+")]
    _contradictions(parts, problems)
    layers = [_read("workloads", workload, problems), *parts, Layer(COMMAND_LINE, overrides)]
    for layer in layers:
        _unknown_keys(layer, problems)
    groups = _merge(layers, problems)
    problems.raise_any()
    label = _label([layer.values for layer in parts], preset)
    return RunConfig(
        preset=label,
        workload_name=str(layers[0].values.get("name", Path(workload).stem)),
        workload=groups["workload"],
        training=groups["training"],
        measurement=groups["measurement"],
    )


def read_ladder(name: str) -> list[str]:
    """Return the presets of a ladder, in order."""
    problems = Problems()
    layer = _read("ladders", name, problems)
    problems.raise_any()
    rows = layer.values.get("presets")
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"{layer.place}: presets: a list of presets is needed")
    return [str(row) for row in rows]


def _read(kind: str, name: str, problems: Problems) -> Layer:
    """Return the settings of a shipped file or of the user's own."""
    path = shipped(kind, name)
    if not path.is_file() or Path(name).name != name:
        path = Path(name)
        if path.suffix not in (".yaml", ".yml"):
            problems.add(_unknown(f"{kind[:-1]}={name!r}", name, names(kind), "or a YAML file"))
            return Layer(name, {})
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        problems.add(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}")
        return Layer(str(path), {})
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        what = getattr(error, "problem", None) or "not YAML"
        problems.add(f"{path}:{where} is not valid YAML: {what}")
        return Layer(str(path), {})
    if not isinstance(values, dict):
        problems.add(f"{path}: holds {type(values).__name__}, not `key: value` lines")
        return Layer(str(path), {})
    return Layer(str(path), values)


def _contradictions(parts: Sequence[Layer], problems: Problems) -> None:
    """Note settings that two presets of a stack want differently."""
    wanted: dict[str, tuple[str, Any]] = {}
    for part in parts:
        for key, value in part.values.items():
            if key in _WORDS + _CHOICES or key not in FIELDS:
                continue
            name = str(part.values.get("name", part.place))
            other, before = wanted.setdefault(key, (name, value))
            if before != value and key != "training_arguments":
                problems.add(
                    f"preset: {other} and {name} contradict each other: "
                    f"{key} is {before!r} in the one and {value!r} in the other"
                )


def _unknown_keys(layer: Layer, problems: Problems) -> None:
    for key in layer.values:
        if key not in FIELDS and key not in _WORDS + _CHOICES + ("effective_batch",):
            known = [*FIELDS, "effective_batch", "preset", "workload"]
            problems.add(_unknown(f"{layer.place}: unknown key {key!r}", str(key), known))


def _unknown(subject: str, name: str, known: Sequence[str], more: str = "") -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{subject}: expected one of {', '.join(known)}{' ' + more if more else ''}{hint}"


def _merge(layers: Sequence[Layer], problems: Problems) -> dict[str, Any]:
    """Return the models of all groups, each value from the highest layer that has it."""
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for layer in layers:
        for key, value in _expand(layer, values, problems).items():
            if key in FIELDS:
                if key == "training_arguments":
                    value = _arguments(layer.place, value, problems)
                    value = {**values.get(key, {}), **value}
                values[key], places[key] = value, layer.place
    check_training_arguments(values.get("training_arguments", {}), places, problems.add)
    built = {}
    for group, model in GROUPS.items():
        own = {key: value for key, value in values.items() if FIELDS[key] == group}
        try:
            built[group] = model.model_validate(own)
        except ValidationError as error:
            for detail in error.errors():
                key = str(detail["loc"][0])
                problems.add(f"{places[key]}: {key}={detail['input']!r}: {_words(key, detail)}")
    return built


def _words(key: str, detail: Any) -> str:
    """Return pydantic's message, with the nearest name where the choices are names."""
    message = str(detail["msg"])
    choices = detail.get("ctx", {}).get("expected")
    if detail["type"] == "literal_error" and choices:
        allowed = [choice.strip(" '") for choice in choices.replace(" or ", ", ").split(",")]
        near = difflib.get_close_matches(str(detail["input"]), allowed, n=1, cutoff=0.5)
        message = f"expected one of {', '.join(allowed)}"
        message += f"; did you mean {near[0]!r}?" if near else ""
    elif detail["type"] == "string_pattern_mismatch":
        message = f"expected {GROUPS[FIELDS[key]].model_fields[key].description}"
    return message[0].lower() + message[1:]


def _expand(layer: Layer, lower: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    """Return the layer's settings with `effective_batch` turned into an accumulation."""
    values = dict(layer.values)
    wanted = values.pop("effective_batch", None)
    if wanted is None:
        return values
    micro = values.get("micro_batch", lower.get("micro_batch", _default("micro_batch")))
    try:
        effective, size = int(str(wanted)), int(str(micro))
    except ValueError:
        problems.add(f"{layer.place}: effective_batch={wanted!r}: expected a whole number")
        return values
    if size < 1:
        return values  # micro_batch has its own message
    if effective < 1 or effective % size:
        problems.add(
            f"{layer.place}: effective_batch={effective}: expected a multiple of micro_batch={size}"
        )
    elif "accumulation" in values and str(values["accumulation"]) != str(effective // size):
        problems.add(
            f"{layer.place}: effective_batch={effective} is not micro_batch={size} x "
            f"accumulation={values['accumulation']}; give two of the three"
        )
    else:
        values["accumulation"] = effective // size
    return values


def _default(key: str) -> Any:
    return GROUPS[FIELDS[key]].model_fields[key].default


def _arguments(place: str, value: Any, problems: Problems) -> dict[str, Any]:
    """Return further TrainingArguments: a mapping in YAML, JSON on the command line."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            problems.add(f"{place}: training_arguments={value!r}: not JSON: {error}")
            return {}
    if not isinstance(value, dict):
        problems.add(f"{place}: training_arguments={value!r}: expected a mapping")
        return {}
    return value


def _label(parts: Sequence[Mapping[str, Any]], preset: str) -> Label:
    texts = {
        word: (" + " if word == "summary" else "\n").join(
            str(p[word]) for p in parts if p.get(word)
        )
        for word in ("summary", "why")
    }
    stems = [
        str(p.get("name") or Path(n.strip()).stem)
        for p, n in zip(parts, preset.split("+"), strict=True)
    ]
    return Label(name="+".join(stems), **texts)
