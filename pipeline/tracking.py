"""MLflow: which runs there are, how they open and how they end; `writer` fills them."""

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
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from pipeline import processes
from pipeline.config import RunConfig
from pipeline.curves import CurveSender
from pipeline.errors import Interrupted, TrackingError
from pipeline.record import Event, Outcome, RunRecord
from pipeline.stores import opening
from pipeline.writer import NOTE, RunWriter, describe_experiment

_log = logging.getLogger(__name__)
_SYSTEM_METRICS_SECONDS = 2  # a short training has some too
Client = MlflowClient
"""What `connect` returns, for those who only hand it on."""
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
    """The MLflow run of one training, from its first param to its status."""

    def __init__(self, writer: RunWriter, began_at: float) -> None:
        self.writer = writer
        self._sender = CurveSender(writer.points, began_at)

    def handle(self, event: Event) -> None:
        """Log an event's curves, soon."""
        self._sender.handle(event)

    def finish(self, record: RunRecord, note: str, artifacts: Path | None) -> None:
        """Log summary, note and files, whatever becomes of the others. Raises TrackingError."""
        errors: list[Exception] = [lost] if (lost := self.close()) else []
        tags = _tags(record) | {NOTE: note}
        writer = self.writer
        steps = [
            partial(writer.summary, record.metrics, record.ended_at),
            partial(writer.tag, tags),
        ]
        if artifacts:
            steps.append(partial(writer.artifacts, artifacts))
        for step in steps:
            try:
                step()
            except Exception as error:  # a store of artifacts has errors of its own
                errors.append(error)
        if errors:
            reasons = "; ".join(dict.fromkeys(map(str, errors)))
            raise TrackingError(f"not everything could be logged to MLflow: {reasons}")

    def close(self) -> TrackingError | None:
        """Send what is left of the curves; return why some of them are lost."""
        self._sender.close()
        if self._sender.error is None:
            return None
        return TrackingError(
            f"{self._sender.unsent} points could not be sent: {self._sender.error}"
        )


@contextmanager
def tracked_run(
    client: MlflowClient,
    config: RunConfig,
    began_at: float,
    name: str | None = None,
    tags: Mapping[str, str] | None = None,
) -> Iterator[TrackedRun]:
    """Open the MLflow run of one training; inside a `parent_run` it becomes a child of that.

    The caller reports the record by `finish` and `end_run`; whatever else ends the block leaves the
    run FAILED, or KILLED if it was an interrupt.
    """
    name = name or f"{config.preset.name} on {config.workload_name}"
    with (
        _opened(client, name, config.dotted(), tags or {}, system_metrics=True) as writer,
        closing(TrackedRun(writer, began_at)) as tracked,
    ):
        mlflow.log_input(_dataset(config), context="training")
        yield tracked


@contextmanager
def parent_run(client: MlflowClient, name: str, params: Mapping[str, Any]) -> Iterator[RunWriter]:
    """Open a run whose children are the runs that are opened inside; it ends with the block."""
    with _opened(client, name, params, {}, system_metrics=False) as writer:
        yield writer
        with processes.interrupts_put_off():
            mlflow.end_run("FINISHED")


@contextmanager
def _opened(
    client: MlflowClient,
    name: str,
    params: Mapping[str, Any],
    tags: Mapping[str, str],
    *,
    system_metrics: bool,
) -> Iterator[RunWriter]:
    """Open the run that `mlflow run` made for us, or a new one, below the one that is active."""
    mlflow.set_system_metrics_sampling_interval(_SYSTEM_METRICS_SECONDS)
    mlflow.set_system_metrics_samples_before_logging(1)
    writer = None
    try:
        with processes.interrupts_put_off():
            nested = mlflow.active_run() is not None
            # Adopts MLFLOW_RUN_ID where it is set.
            run = mlflow.start_run(nested=nested, log_system_metrics=system_metrics)
            writer = RunWriter(client, run)
        if not nested:
            for stale in close_stale_runs(client, writer.experiment_id):
                _log.warning("ended a run that a killed command had left open: %s", stale)
        describe_experiment(client, writer.experiment_id)
        own = {"mlflow.runName": name, _HOST: socket.gethostname(), _PROCESS: processes.identity()}
        writer.tag(own | dict(tags))
        for refused in writer.params(params):
            _log.warning("MLflow refused a param: %s", refused)
        yield writer
    except BaseException as error:
        if writer:
            _end_active_run(writer, error)
        if isinstance(error, MlflowException):
            raise TrackingError(f"the MLflow run cannot be opened: {error}") from error
        raise


def end_unopened_run(reason: str) -> None:
    """End the run that `mlflow run` made for us: if it was killed itself, nobody else does."""
    with suppress(MlflowException):
        client, run_id = MlflowClient(), os.environ["MLFLOW_RUN_ID"]
        RunWriter(client, client.get_run(run_id)).tag(_reason(reason))
        client.set_terminated(run_id, "KILLED")


def _end_active_run(writer: RunWriter, error: BaseException) -> None:
    """End a run that has no record; one that was ended has its status already."""
    active, stopped = mlflow.active_run(), isinstance(error, Interrupted | KeyboardInterrupt)
    if active is None or active.info.run_id != writer.run_id:
        return
    with suppress(MlflowException):  # the server may be the reason why we are here
        kind = "interrupted" if stopped else type(error).__name__
        writer.tag(_reason(f"{kind}: {error}"))
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
        RunWriter(client, run).tag(_reason("the command was killed"))
        client.set_terminated(run.info.run_id, "KILLED")
    return [run.info.run_name for run in stale]


def _reason(reason: str) -> dict[str, str]:
    return {"outcome": Outcome.FAILED.value, "reason": reason, "partial": "true"}


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
    if record.ledger and record.ledger.phase:
        tags["ledger.phase"] = record.ledger.phase
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
