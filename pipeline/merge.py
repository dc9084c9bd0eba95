"""Settings of all layers become values of the models: the highest wins, and each is checked."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from pipeline.config import FIELDS, GROUPS, Training
from pipeline.layers import Layer, Problems, did_you_mean
from pipeline.reserved import check_training_arguments


class Merged(NamedTuple):
    """The models of all groups; a setting that was refused has its default there."""

    groups: Mapping[str, Any]
    refused: frozenset[str]


def check_contradictions(parts: Sequence[Layer], problems: Problems) -> None:
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
            yield key, _whole(value)


def merge(layers: Sequence[Layer], problems: Problems) -> Merged:
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


def _validated(values: Mapping[str, Any], places: Mapping[str, str], problems: Problems) -> Merged:
    built, refused = {}, set()
    for group, model in GROUPS.items():
        own = {key: value for key, value in values.items() if FIELDS[key] == group}
        try:
            built[group] = model.model_validate(own)
        except ValidationError as error:
            for detail in error.errors():
                key = str(detail["loc"][0])
                problems.add(f"{places[key]}: {key}={detail['input']!r}: {_words(key, detail)}")
                refused.add(key)
            sound = {key: value for key, value in own.items() if key not in refused}
            built[group] = model.model_validate(sound)
    return Merged(built, frozenset(refused))


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
    effective, size = _whole(wanted), _whole(micro)
    if effective is None:
        problems.add(f"{subject}: expected a whole number above 0")
        return
    if size is None:
        return  # micro_batch has its own message
    if effective % size:
        problems.add(f"{subject}: expected a multiple of micro_batch={size}")
        return
    if "accumulation" in layer.values:
        given = _whole(layer.values["accumulation"])
        if given is None:
            return  # it has its own message too
        if given != effective // size:
            wrong = f"is not micro_batch={size} x accumulation={given}"
            problems.add(f"{subject}: {wrong}; give two of the three")
    values["accumulation"], places["accumulation"] = effective // size, layer.place


def _whole(value: Any) -> int | None:
    """Read a batch as the models do, whatever it is written as."""
    try:
        return Training.model_validate({"accumulation": value}).accumulation
    except ValidationError:
        return None


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
