"""Settings from files: YAML read, and every problem noted with its place."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pipeline.errors import ConfigError
from pipeline.paths import names, shipped


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


def read_layer(kind: str, name: str, problems: Problems) -> Layer:
    """Return the settings of a shipped file or of the user's own."""
    path = shipped(kind, name)
    if not path.is_file() or Path(name).name != name:
        path = Path(name)
        if path.suffix not in (".yaml", ".yml"):
            problems.add(unknown(f"{kind[:-1]}={name!r}", name, names(kind), "or a YAML file"))
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


def unknown(subject: str, name: str, known: Sequence[str], more: str = "") -> str:
    """Say that a name is not known, which are, and which was meant."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"{subject}: expected one of {', '.join(known)}{' ' + more if more else ''}{hint}"
