"""MLflow: the run, its params, curves, tags and artifacts. Only `script_run` talks to it too."""

import json
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import mlflow
from mlflow.data.code_dataset_source import CodeDatasetSource
from mlflow.data.dataset_source import DatasetSource
from mlflow.data.dataset_source_registry import resolve_dataset_source
from mlflow.data.meta_dataset import MetaDataset
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from pipeline import processes
from pipeline.config import RunConfig
from pipeline.curves import CurveSender, Point
from pipeline.errors import Interrupted, TrackingError
from pipeline.record import Event, Outcome, RunRecord
from pipeline.stores import opening

_log = logging.getLogger(__name__)
_METRICS_PER_BATCH = 1000
_PARAMS_PER_BATCH = 100
_PARAM_LENGTH = 6000
_TAG_LENGTH = 8000
_SYSTEM_METRICS_SECONDS = 5
_HOST, _PROCESS = "pipeline.host", "pipeline.process"


def connect() -> MlflowClient:
    """Return a client for the tracking server, once it has answered. Raises TrackingError."""
    uri = mlflow.get_tracking_uri()
    try:
        with opening(uri):
            client = MlflowClient(uri)
            client.search_experiments(max_results=1)
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise TrackingError(
            f"MLFLOW_TRACKING_URI={uri}: the tracking server cannot be used: {reason[0]}"
        ) from error
    return client


class TrackedRun:
    """One MLflow run, from its first param to its status."""

    def __init__(self, client: MlflowClient, run: Any, began_at: float) -> None:
        self.run_id: str = run.info.run_id
        self.experiment_id: str = run.info.experiment_id
        self._client = client
        self._sender = CurveSender(self._send, began_at)

    def handle(self, event: Event) -> None:
        """Log an event's curves, soon."""
        self._sender.handle(event)

    def finish(self, record: RunRecord, note: str, artifacts: Path | None) -> None:
        """Log summary, note and files, whatever becomes of the others. Raises TrackingError."""
        self._sender.close()
        errors = [self._sender.error] if self._sender.error else []
        tags = _tags(record) | {"mlflow.note.content": note}
        steps = [partial(self.summary, record.metrics, record.ended_at), partial(self.tag, tags)]
        if artifacts:
            steps.append(partial(self._client.log_artifacts, self.run_id, str(artifacts)))
        for step in steps:
            try:
                step()
            except Exception as error:  # a store of artifacts has errors of its own
                errors.append(error)
        if errors:
            reasons = "; ".join(dict.fromkeys(map(str, errors)))
            raise TrackingError(f"not everything could be logged to MLflow: {reasons}")

    def close(self) -> None:
        """Send what is left of the curves."""
        self._sender.close()

    def summary(self, metrics: Mapping[str, float], ended_at: float) -> None:
        """Log figures that stand for the whole training."""
        at = round(ended_at * 1e3)
        self._send([Point(key, value, at, 0) for key, value in metrics.items()])

    def tag(self, tags: Mapping[str, str]) -> None:
        """Set tags."""
        entities = [RunTag(key, str(value)[:_TAG_LENGTH]) for key, value in tags.items()]
        self._client.log_batch(self.run_id, tags=entities)

    def params(self, values: Mapping[str, Any]) -> list[str]:
        """Log params; return what MLflow refused, without losing the rest of them."""
        entities = [Param(key, _text(value)[:_PARAM_LENGTH]) for key, value in values.items()]
        refused = []
        for begin in range(0, len(entities), _PARAMS_PER_BATCH):
            batch = entities[begin : begin + _PARAMS_PER_BATCH]
            try:
                self._client.log_batch(self.run_id, params=batch)
            except MlflowException:  # one value that differs from an earlier one drops them all
                refused += [r for r in map(self._param, batch) if r]
        return refused

    def _param(self, param: Param) -> str | None:
        try:
            self._client.log_param(self.run_id, param.key, param.value)
        except MlflowException:
            return f"param {param.key}={param.value}: the run has another value already"
        return None

    def _send(self, points: list[Point]) -> None:
        metrics = [Metric(*point) for point in points]
        for begin in range(0, len(metrics), _METRICS_PER_BATCH):
            batch = metrics[begin : begin + _METRICS_PER_BATCH]
            self._client.log_batch(self.run_id, metrics=batch)


@contextmanager
def tracked_run(client: MlflowClient, config: RunConfig, began_at: float) -> Iterator[TrackedRun]:
    """Open the MLflow run of one training: the one that `mlflow run` made, or a new one.

    The caller reports the record by `finish` and `end_run`; whatever else ends the block leaves the
    run FAILED, or KILLED if it was an interrupt.
    """
    mlflow.set_system_metrics_sampling_interval(_SYSTEM_METRICS_SECONDS)
    mlflow.set_system_metrics_samples_before_logging(1)
    try:
        with processes.interrupts_put_off():
            # Adopts MLFLOW_RUN_ID where it is set.
            run = mlflow.start_run(log_system_metrics=True)
        with closing(TrackedRun(client, run, began_at)) as tracked:
            tracked.tag({"mlflow.runName": f"{config.preset.name} on {config.workload_name}"})
            tracked.tag({_HOST: socket.gethostname(), _PROCESS: processes.identity()})
            for refused in tracked.params(config.dotted()):
                _log.warning("MLflow refused a param: %s", refused)
            mlflow.log_input(_dataset(config), context="training")
            yield tracked
    except BaseException as error:
        _end_active_run(client, error)
        if isinstance(error, MlflowException):
            raise TrackingError(f"the MLflow run cannot be opened: {error}") from error
        raise


def end_unopened_run(reason: str) -> None:
    """End the run that `mlflow run` made for us: if it was killed itself, nobody else does."""
    with suppress(MlflowException):
        client, run_id = MlflowClient(), os.environ["MLFLOW_RUN_ID"]
        _tag_reason(client, run_id, reason)
        client.set_terminated(run_id, "KILLED")


def _end_active_run(client: MlflowClient, error: BaseException) -> None:
    """End the run of a training that has no record; one that was ended has its status already."""
    active, stopped = mlflow.active_run(), isinstance(error, Interrupted | KeyboardInterrupt)
    if active is None:
        return
    with suppress(MlflowException):  # the server may be the reason why we are here
        kind = "interrupted" if stopped else type(error).__name__
        _tag_reason(client, active.info.run_id, f"{kind}: {error}")
        mlflow.end_run("KILLED" if stopped else "FAILED")


def end_run(record: RunRecord) -> None:
    """Give the active run the status that belongs to this record."""
    completed = record.outcome is Outcome.COMPLETED
    try:
        mlflow.end_run("KILLED" if record.interrupted else "FINISHED" if completed else "FAILED")
    except MlflowException as error:
        raise TrackingError(f"the run is still open in MLflow: {error}") from error


def close_stale_runs(client: MlflowClient, experiment_id: str) -> list[str]:
    """End the runs that a killed command of this machine left RUNNING; return their names.

    SIGKILL cannot be caught, so the next start puts things right.
    """
    host = socket.gethostname()
    found = client.search_runs(
        [experiment_id], f"attributes.status = 'RUNNING' and tags.`{_HOST}` = '{host}'"
    )
    stale = [run for run in found if not processes.is_alive(run.data.tags.get(_PROCESS, ""))]
    for run in stale:
        _tag_reason(client, run.info.run_id, "the command was killed")
        client.set_terminated(run.info.run_id, "KILLED")
    return [run.info.run_name for run in stale]


def _tag_reason(client: MlflowClient, run_id: str, reason: str) -> None:
    for key, value in {
        "outcome": Outcome.FAILED.value,
        "reason": reason,
        "partial": "true",
    }.items():
        client.set_tag(run_id, key, value[:_TAG_LENGTH])


def where_to_look(run_id: str, experiment_id: str) -> str:
    """Return what to do to see the run."""
    uri = mlflow.get_tracking_uri()
    page = f"#/experiments/{experiment_id}/runs/{run_id}?workflowType=machine_learning"
    if uri.startswith("http"):
        return f"{uri.rstrip('/')}/{page}"
    return f"mlflow ui --backend-store-uri {uri}   then open http://127.0.0.1:5000/{page}"


def _tags(record: RunRecord) -> dict[str, str]:
    tags = {"outcome": record.outcome.value}
    tags |= {f"version.{name}": number for name, number in record.versions.items()}
    if record.message:
        tags["reason"] = record.message
    if record.interrupted or record.outcome is not Outcome.COMPLETED:
        tags["partial"] = "true"
    if record.diverged:
        tags["diverged"] = "true"
    if record.memory_source:
        tags["memory.source"] = record.memory_source
    if record.device:
        tags["device.name"] = record.device.name
        tags |= {"device.uuid": record.device.uuid} if record.device.uuid else {}
    return tags


def _dataset(config: RunConfig) -> MetaDataset:
    """Describe the data without building it: that is the worker's work."""
    workload = config.workload
    if workload.data == "random":
        kept = ("samples", "seq_len", "labels", "seed", "task")
        source: DatasetSource = CodeDatasetSource(
            {key: str(getattr(workload, key)) for key in kept}
        )
        name = f"random-{workload.samples}x{workload.seq_len}"
    else:
        source = resolve_dataset_source(str(Path(workload.data).resolve()))
        name = Path(workload.data).name
    return MetaDataset(source, name=name)  # type: ignore[abstract]


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(dict(value)) if isinstance(value, Mapping) else str(value)
