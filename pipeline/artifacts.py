"""The files that a run leaves behind."""

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pyarrow.parquet
import yaml

from pipeline.config import RunConfig
from pipeline.figures import memory_figure
from pipeline.launcher import Launched
from pipeline.record import MIB, MemorySample

_COLUMNS = {name: f"{name}_mib" for name in MemorySample._fields if name != "seconds"}


def write_artifacts(launched: Launched, folder: Path) -> None:
    """Write what is known of a training into this folder."""
    record, recorder = launched.record, launched.recorder
    (folder / "config.yaml").write_text(config_yaml(record.config), encoding="utf-8")
    (folder / "record.json").write_text(record.model_dump_json(indent=2) + "\n", encoding="utf-8")
    (folder / "worker.log").write_text(launched.log, encoding="utf-8")
    if recorder.samples:
        write_curve(recorder.samples, folder / "memory.parquet")
    if recorder.built:
        arguments = dict(recorder.built.arguments) | {"output_dir": "trainer_output"}
        text = json.dumps(arguments, indent=2, default=str) + "\n"
        (folder / "training_arguments.json").write_text(text, encoding="utf-8")
    for name, content in recorder.files.items():
        (folder / name).write_bytes(content)
    if recorder.samples:  # last: the others are there if it fails
        memory_figure(record, recorder, folder / "memory.png")


def config_yaml(config: RunConfig) -> str:
    """Return the resolved configuration as a preset file: feeding it back repeats the run."""
    words = {"name": config.preset.name, "summary": config.preset.summary, "why": config.preset.why}
    values = words | {"workload": config.workload_name} | config.flat()
    head = "# Repeats this run: mlflow run . -P preset=PATH_TO_THIS_FILE\n"
    return head + str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


def write_curve(samples: Sequence[MemorySample], path: Path) -> None:
    """Write every reading: `seconds` and one column of MiB per figure, null where not measured."""
    columns: dict[str, list[float | None]] = {"seconds": [sample.seconds for sample in samples]}
    for index, name in enumerate(MemorySample._fields):
        if name in _COLUMNS:
            counts = [sample[index] for sample in samples]
            columns[_COLUMNS[name]] = [None if c is None else c / MIB for c in counts]
    table = pyarrow.table(
        {name: pyarrow.array(values, "float64") for name, values in columns.items()}
    )
    pyarrow.parquet.write_table(table, path)
