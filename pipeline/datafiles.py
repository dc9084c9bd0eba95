"""Files of text and labels: what they have to hold, and what one does hold."""

import csv
import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet

# By suffix, the loader of the `datasets` library.
LOADERS = {".csv": "csv", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
TEXT_COLUMNS = ("text", "sentence", "content")
LABEL_COLUMNS = ("label", "labels")


class Contents(NamedTuple):
    """What can be seen of a file without loading it."""

    rows: int
    columns: tuple[str, ...] = ()
    """Empty where they are not known."""
    labels: frozenset[Any] = frozenset()
    """Different labels of the rows that are taken."""


def look_into(path: Path, taken: int) -> Contents:
    """Return what a file holds; of its rows the first `taken` count. Raises what reading does."""
    if path.suffix == ".parquet":
        return _parquet(path, taken)
    if path.suffix == ".csv":
        with path.open(encoding="utf-8-sig", newline="") as lines:
            return _csv(filter(None, csv.reader(lines)), taken)
    with path.open(encoding="utf-8") as lines:
        return _json(lines.read(), taken)


def column(columns: Iterable[str], names: Iterable[str]) -> str | None:
    """Return the first of these names that is a column."""
    return next((name for name in names if name in columns), None)


def _parquet(path: Path, taken: int) -> Contents:
    file = pyarrow.parquet.ParquetFile(path)
    columns = tuple(file.schema_arrow.names)
    label = column(columns, LABEL_COLUMNS)
    labels = file.read(columns=[label]).slice(0, taken)[label].to_pylist() if label else []
    return Contents(int(file.metadata.num_rows), columns, frozenset(map(_same, labels)))


def _csv(rows: Iterable[list[str]], taken: int) -> Contents:
    rows = iter(rows)
    columns = tuple(next(rows, []))
    label = column(columns, LABEL_COLUMNS)
    place = columns.index(label) if label else len(columns)
    first = list(islice(rows, taken))
    labels = frozenset(_same(row[place]) for row in first if len(row) > place)
    return Contents(len(first) + sum(1 for _ in rows), columns, labels - {""})


def _json(text: str, taken: int) -> Contents:
    if text.lstrip().startswith("["):
        rows = json.loads(text)
        number, first = len(rows), rows[:taken]
    else:
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            number, first = len(lines), [json.loads(line) for line in lines[:taken]]
        except ValueError:  # an object may take several lines
            return Contents(len(lines))
    if not all(isinstance(row, dict) for row in first):
        return Contents(number)
    columns = tuple(dict.fromkeys(key for row in first for key in row))
    label = column(columns, LABEL_COLUMNS)
    return Contents(number, columns, frozenset(_same(row[label]) for row in first if label in row))


def _same(value: Any) -> Any:
    """Return the label as a loader sees it: 1 and 1.0 in one column are one label."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)
