"""What can be known to be wrong before anything starts: devices, files, sizes."""

import csv
import json
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pipeline import nvml
from pipeline.config import Measurement, RunConfig, Workload
from pipeline.datafiles import LABEL_COLUMNS, LOADERS, TEXT_COLUMNS, Contents, column, look_into
from pipeline.errors import ConfigError
from pipeline.layers import Finding
from pipeline.paths import names, shipped

_DEFAULT_LABELS = 2  # of a transformers configuration that does not say


def default_workload(device: str) -> tuple[str, str]:
    """Return the workload that suits this machine, and why, in one line."""
    if pick_device(device) != "cpu":
        return "article", "workload=auto: article, since the training runs on a GPU"
    return "laptop", "workload=auto: laptop, since the training runs on the CPU"


def pick_device(device: str) -> str:
    """Return `device`, or what `auto` means here."""
    if device != "auto":
        return device
    return "cuda" if nvml.usable_gpus() and not _torch_is_cpu_build() else "cpu"


def why_no_gpu(asked: str) -> str | None:
    """Return why a training has no figures of a GPU and what it has instead; None if it has."""
    if pick_device(asked) != "cpu":
        return None
    reason = "as asked for"
    if asked == "auto":
        cpu_build = nvml.usable_gpus() and _torch_is_cpu_build()
        reason = "since this torch is a CPU build" if cpu_build else "since no GPU is visible"
    return f"device=cpu, {reason}: measured is the memory of the training process, not a GPU's"


def prepare(config: RunConfig) -> RunConfig:
    """Return the configuration with its device named. Raises ConfigError with every problem."""
    problems = [found.problem for found in look(config)]
    if problems:
        raise ConfigError(*problems)
    return with_device(config)


def with_device(config: RunConfig) -> RunConfig:
    """Return the configuration with its device named."""
    device = pick_device(config.measurement.device)
    measurement = Measurement.model_validate(config.measurement.model_dump() | {"device": device})
    return config.model_copy(update={"measurement": measurement})


def look(config: RunConfig) -> Iterator[Finding]:
    """Yield what cannot go well, although each setting is good for itself."""
    try:
        values = _model_values(config.workload)
    except ConfigError as error:
        yield Finding(("model",), str(error))
        values = None
    if values is not None:
        yield from _model_findings(values, config.workload)
    yield from _data_findings(config, values)
    if config.measurement.snapshot and pick_device(config.measurement.device) == "cpu":
        problem = "snapshot=true: torch keeps a memory history of a GPU only, and here is none"
        yield Finding(("snapshot", "device"), problem)


def _torch_is_cpu_build() -> bool:
    """Tell from the version, since importing torch takes seconds."""
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False


def _model_values(workload: Workload) -> Mapping[str, Any] | None:
    """Return the configuration of a model that is a file; None for another. Raises ConfigError."""
    is_shipped = workload.model in names("models")
    path = shipped("models", workload.model) if is_shipped else Path(workload.model)
    subject = f"model={workload.model!r}"
    try:
        if not path.is_file():
            if path.suffix == ".json":
                known = ", ".join(names("models"))
                raise ConfigError(f"{subject}: there is no such file; shipped are {known}")
            return None
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:  # a folder that is forbidden, a name that is too long
        raise ConfigError(f"{subject}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{subject}: cannot be read as JSON: {error}") from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise ConfigError(f"{subject}: has no model_type, so it is no transformers configuration")
    return values


def _model_findings(values: Mapping[str, Any], workload: Workload) -> Iterator[Finding]:
    if workload.init == "pretrained":
        cure = "use init=random, or a folder or hub id"
        problem = f"model={workload.model!r}: a configuration has no weights; {cure}"
        yield Finding(("model", "init"), problem)
    longest = values.get("max_position_embeddings")
    if isinstance(longest, int) and workload.seq_len > longest:
        problem = f"seq_len={workload.seq_len}: the model {workload.model} has {longest} positions"
        yield Finding(("model", "seq_len"), problem)


def _data_findings(config: RunConfig, model: Mapping[str, Any] | None) -> Iterator[Finding]:
    workload, micro_batch = config.workload, config.training.micro_batch
    if workload.data == "random":
        rows, source = workload.samples, f"samples={workload.samples}"
    else:
        try:
            contents = _contents(workload)
        except ConfigError as error:
            yield Finding(("data",), str(error))
            return
        yield from _column_findings(contents, workload, model)
        rows = min(contents.rows, workload.samples)
        source = f"{workload.data} with {contents.rows} rows"
    if micro_batch > rows:
        problem = f"micro_batch={micro_batch}: more than the data has ({source}); at most {rows}"
        yield Finding(("data", "samples", "micro_batch"), problem)


def _contents(workload: Workload) -> Contents:
    """Return what the file of the data holds. Raises ConfigError."""
    path, subject = Path(workload.data), f"data={workload.data!r}"
    if path.suffix not in LOADERS:
        allowed = f"`random` or a file that ends in {', '.join(LOADERS)}"
        raise ConfigError(f"{subject}: expected {allowed}")
    try:
        contents = look_into(path, workload.samples)
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        # `mlflow run` changes into the project's folder: a relative path may be another file's.
        looked = "" if path.is_absolute() else f" ({path.absolute()})"
        raise ConfigError(f"{subject}: cannot be read: {reason}{looked}") from error
    if contents.rows == 0:
        raise ConfigError(f"{subject}: no rows in {path}")
    return contents


def _column_findings(
    contents: Contents, workload: Workload, model: Mapping[str, Any] | None
) -> Iterator[Finding]:
    if not contents.columns:
        return
    subject, classifies = f"data={workload.data!r}", workload.task == "sequence-classification"
    for wanted in (TEXT_COLUMNS, LABEL_COLUMNS) if classifies else (TEXT_COLUMNS,):
        if column(contents.columns, wanted) is None:
            has = f"has the columns {', '.join(contents.columns)}"
            problem = f"{subject}: {has}; one of them has to be named {' or '.join(wanted)}"
            yield Finding(("data", "samples", "task"), problem)
    if not classifies or model is None:
        return
    told_apart = len(model.get("id2label") or ()) or model.get("num_labels", _DEFAULT_LABELS)
    if isinstance(told_apart, int) and len(contents.labels) > told_apart:
        found = f"{len(contents.labels)} different labels"
        cure = "a configuration of your own can hold num_labels"
        problem = f"{subject}: {found}, the model tells {told_apart} apart; {cure}"
        yield Finding(("data", "samples", "task", "model"), problem)
