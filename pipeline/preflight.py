"""What can be known to be wrong before anything starts: devices, files, sizes."""

import csv
import json
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pyarrow.parquet

from pipeline import nvml
from pipeline.config import Measurement, RunConfig, Workload
from pipeline.errors import ConfigError
from pipeline.paths import names, shipped

_SUFFIXES = (".csv", ".jsonl", ".json", ".parquet")


def default_workload(device: str) -> tuple[str, str]:
    """Return the workload that suits this machine, and why, in one line."""
    if pick_device(device) != "cpu":
        return "article", "workload=auto: article, since there is a GPU"
    return "laptop", "workload=auto: laptop, since the training runs on the CPU"


def pick_device(device: str) -> str:
    """Return `device`, or what `auto` means here."""
    if device != "auto":
        return device
    return "cuda" if nvml.usable_gpus() and not _torch_is_cpu_build() else "cpu"


def prepare(config: RunConfig) -> RunConfig:
    """Return the configuration with its device named. Raises ConfigError with every problem."""
    problems = [*_model_problems(config.workload), *_data_problems(config)]
    if problems:
        raise ConfigError(*problems)
    device = pick_device(config.measurement.device)
    measurement = Measurement.model_validate(config.measurement.model_dump() | {"device": device})
    return config.model_copy(update={"measurement": measurement})


def _torch_is_cpu_build() -> bool:
    """Tell from the version, since importing torch takes seconds."""
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False


def _model_problems(workload: Workload) -> Iterator[str]:
    is_shipped = workload.model in names("models")
    path = shipped("models", workload.model) if is_shipped else Path(workload.model)
    subject = f"model={workload.model!r}"
    try:
        is_file = path.is_file()
    except OSError as error:  # a folder that is forbidden, a name that is too long
        yield f"{subject}: cannot be read: {error.strerror}"
        return
    if not is_file:
        if path.suffix == ".json":
            yield f"{subject}: there is no such file; shipped are {', '.join(names('models'))}"
        return
    if workload.init == "pretrained":
        yield f"{subject}: a configuration has no weights; use init=random, or a folder or hub id"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        yield f"{subject}: cannot be read as JSON: {error}"
        return
    if not isinstance(values, dict) or "model_type" not in values:
        yield f"{subject}: has no model_type, so it is no transformers configuration"
        return
    longest = values.get("max_position_embeddings")
    if isinstance(longest, int) and workload.seq_len > longest:
        yield f"seq_len={workload.seq_len}: the model {workload.model} has {longest} positions"


def _data_problems(config: RunConfig) -> Iterator[str]:
    workload, micro_batch = config.workload, config.training.micro_batch
    if workload.data == "random":
        rows, source = workload.samples, f"samples={workload.samples}"
    else:
        path = Path(workload.data)
        if path.suffix not in _SUFFIXES:
            allowed = f"`random` or a file that ends in {', '.join(_SUFFIXES)}"
            yield f"data={workload.data!r}: expected {allowed}"
            return
        try:
            found = _count_rows(path)
        except (OSError, ValueError, RecursionError, csv.Error) as error:
            reason = getattr(error, "strerror", None) or error
            # `mlflow run` changes into the project's folder: a relative path may be another file's.
            looked = "" if path.is_absolute() else f" ({path.absolute()})"
            yield f"data={workload.data!r}: cannot be read: {reason}{looked}"
            return
        if found == 0:
            yield f"data={workload.data!r}: no rows in {path}"
            return
        rows, source = min(found, workload.samples), f"{path} with {found} rows"
    if micro_batch > rows:
        yield f"micro_batch={micro_batch}: more than the data has ({source}); at most {rows}"


def _count_rows(path: Path) -> int:
    if path.suffix == ".parquet":
        return int(pyarrow.parquet.ParquetFile(path).metadata.num_rows)
    with path.open(encoding="utf-8", newline="") as lines:
        if path.suffix == ".csv":
            return max(sum(1 for row in csv.reader(lines) if row) - 1, 0)
        text = lines.read()
    if text.lstrip().startswith("["):
        return len(json.loads(text))
    return sum(1 for line in text.splitlines() if line.strip())
