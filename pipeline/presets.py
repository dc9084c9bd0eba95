"""From names, files and command-line values to one checked RunConfig, or to every problem at once.

Precedence, lowest first: the models' defaults, the workload file, the preset files from left to
right, the command line.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.config import FIELDS, GROUPS, Label, RunConfig
from pipeline.errors import ConfigError
from pipeline.layers import Layer, Problems, did_you_mean, read_layer, unknown
from pipeline.paths import names
from pipeline.reserved import check_training_arguments

COMMAND_LINE = "command line"
_WORDS = ("name", "summary", "why")
_CHOICES = ("preset", "workload")


def resolve(preset: str, workload: str, overrides: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of one run.

    `preset` is a name, a file, or several of these joined by `+`; `workload` a name or a file;
    `overrides` come from the command line and may be text. Raises ConfigError.
    """
    problems = Problems()
    parts = _parts(preset, problems)
    _contradictions(parts, problems)
    base = _workload(workload, parts, problems)
    layers = [base, *parts, Layer(COMMAND_LINE, overrides)]
    for layer in layers:
        _unknown_keys(layer, problems)
    groups = _merge(layers, problems)
    problems.raise_any()
    return RunConfig(
        preset=_label([layer.values for layer in parts], preset),
        workload_name=str(base.values.get("name", Path(workload).stem)),
        workload=groups["workload"],
        training=groups["training"],
        measurement=groups["measurement"],
    )


def named_workload(preset: str) -> str | None:
    """Return the workload that a preset file asks for, as the file of an earlier run does."""
    named = [part.values.get("workload") for part in _parts(preset, Problems())]
    return next((str(name) for name in reversed(named) if name), None)


def _parts(preset: str, problems: Problems) -> list[Layer]:
    return [read_layer("presets", part.strip(), problems) for part in preset.split("+")]


def _workload(name: str, parts: Sequence[Layer], problems: Problems) -> Layer:
    asked_by_preset = any(part.values.get("workload") == name for part in parts)
    if asked_by_preset and name not in names("workloads"):
        # The file of an earlier run holds all settings; of the workload only the name is missing.
        return Layer(name, {"name": name})
    return read_layer("workloads", name, problems)


def read_ladder(name: str) -> list[str]:
    """Return the presets of a ladder, in order."""
    problems = Problems()
    layer = read_layer("ladders", name, problems)
    problems.raise_any()
    rows = layer.values.get("presets")
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"{layer.place}: presets: a list of presets is needed")
    return [str(row) for row in rows]


def _contradictions(parts: Sequence[Layer], problems: Problems) -> None:
    """Note settings that two presets of a stack want differently."""
    wanted: dict[str, tuple[str, Any]] = {}
    for part in parts:
        name = str(part.values.get("name", part.place))
        for key, value in _wishes(part.values):
            other, before = wanted.setdefault(key, (name, value))
            if before != value:
                problems.add(
                    f"preset: {other} and {name} contradict each other: "
                    f"{key} is {before!r} in the one and {value!r} in the other"
                )


def _wishes(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield settings in a form that compares: 5e-5 and 0.00005 are one wish."""
    for key, value in values.items():
        if key == "training_arguments" and isinstance(value, dict):
            yield from ((f"{key}: {name}", wish) for name, wish in value.items())
        elif key in FIELDS:
            try:
                yield key, getattr(GROUPS[FIELDS[key]].model_validate({key: value}), key)
            except ValidationError:  # reported where it is read
                continue
        elif key == "effective_batch":
            yield key, str(value)


def _unknown_keys(layer: Layer, problems: Problems) -> None:
    for key in layer.values:
        if key not in FIELDS and key not in _WORDS + _CHOICES + ("effective_batch",):
            known = [*FIELDS, "effective_batch", "preset", "workload"]
            problems.add(unknown(f"{layer.place}: unknown key {key!r}", str(key), known))


def _merge(layers: Sequence[Layer], problems: Problems) -> dict[str, Any]:
    """Return the models of all groups, each value from the highest layer that has it."""
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    batch: Layer | None = None
    for layer in layers:
        if "effective_batch" in layer.values:
            batch = layer
        elif "accumulation" in layer.values:
            batch = None
        for key, value in layer.values.items():
            if key == "training_arguments":
                value = _arguments(layer.place, value, problems)
                check_training_arguments(value, layer.place, problems.add)
                value = {**values.get(key, {}), **value}
            if key in FIELDS:
                values[key], places[key] = value, layer.place
    if batch is not None:
        _set_accumulation(values, places, batch, problems)
    return _validated(values, places, problems)


def _validated(
    values: Mapping[str, Any], places: Mapping[str, str], problems: Problems
) -> dict[str, Any]:
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
    message = str(detail["msg"]).removeprefix("Value error, ")
    choices = detail.get("ctx", {}).get("expected")
    if detail["type"] == "literal_error" and choices:
        allowed = [choice.strip(" '") for choice in choices.replace(" or ", ", ").split(",")]
        near = did_you_mean(str(detail["input"]), allowed)
        message = f"expected one of {', '.join(allowed)}{near}"
    elif detail["type"] == "string_pattern_mismatch":
        message = f"expected {GROUPS[FIELDS[key]].model_fields[key].description}"
    return message[0].lower() + message[1:]


def _set_accumulation(
    values: dict[str, Any], places: dict[str, str], layer: Layer, problems: Problems
) -> None:
    """Turn the effective batch that `layer` asks for into an accumulation."""
    wanted = layer.values["effective_batch"]
    micro = values.get("micro_batch", GROUPS["training"].model_fields["micro_batch"].default)
    subject = f"{layer.place}: effective_batch={wanted}"
    try:
        effective, size = int(str(wanted)), int(str(micro))
    except ValueError:
        problems.add(f"{subject}: expected a whole number")
        return
    if size < 1:
        return  # micro_batch has its own message
    if effective < 1 or effective % size:
        problems.add(f"{subject}: expected a multiple of micro_batch={size}")
        return
    given = layer.values.get("accumulation", effective // size)
    if str(given) != str(effective // size):
        problems.add(
            f"{subject}: is not micro_batch={size} x accumulation={given}; give two of the three"
        )
    values["accumulation"], places["accumulation"] = effective // size, layer.place


def _arguments(place: str, value: Any, problems: Problems) -> dict[str, Any]:
    """Return further TrainingArguments: a mapping in YAML, JSON on the command line."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
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
