"""Settings from files: YAML read, and every problem noted with its place."""

import difflib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pipeline.errors import ConfigError
from pipeline.paths import names, shipped


class Layer(NamedTuple):
    """Settings from one place, in the words of that place."""

    place: str
    values: Mapping[str, Any]


class Finding(NamedTuple):
    """A problem of settings that are each good, and which settings it is about."""

    settings: Collection[str]
    problem: str


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


def read_layer(kind: str, name: str, problems: Problems) -> Layer:
    """Return the settings of a shipped file or of the user's own."""
    path = shipped(kind, name) if name in names(kind) else Path(name)
    if path.suffix not in (".yaml", ".yml"):
        problems.add(unknown(f"{kind[:-1]}={name!r}", name, names(kind), "or a YAML file"))
        return Layer(name, {})
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        problems.add(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}")
        return Layer(str(path), {})
    except _NOT_YAML as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        what = getattr(error, "problem", None) or str(error) or "not YAML"
        problems.add(f"{path}:{where} is not valid YAML: {what}")
        return Layer(str(path), {})
    if not isinstance(values, dict):
        problems.add(f"{path}: holds {type(values).__name__}, not `key: value` lines")
        return Layer(str(path), {})
    return Layer(str(path), values)


# What PyYAML lets through of values such as 2023-99-99, `!!bool maybe` and a thousand brackets.
_NOT_YAML = (
    yaml.YAMLError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice; YAML does too, and PyYAML takes the last one."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    problem = f"the key {key.value!r} is there twice"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                seen.add((key.tag, key.value))
        return node


def unknown(subject: str, name: str, known: Sequence[str], more: str = "") -> str:
    """Say that a name is not known, which are, and which was meant."""
    expected = f"{', '.join(known)}{' ' + more if more else ''}"
    return f"{subject}: expected one of {expected}{did_you_mean(name, known)}"


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Return a question that ends a message; nothing where no name comes near."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
