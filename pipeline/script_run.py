"""The MLflow run that is active in somebody's own script."""

import atexit
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import mlflow
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from pipeline.record import Event, Finished, Outcome, Proven, Started
from pipeline.tracking import TrackedRun
from pipeline.writer import RunWriter

_log = logging.getLogger(__name__)


class RunLogger:
    """Logs a training of somebody's own script to the MLflow run that is active there.

    What cannot be logged is a warning, one for each kind: the training is worth more.
    """

    def __init__(self, tracked: TrackedRun, own_run: bool) -> None:
        self._tracked = tracked
        self._writer = tracked.writer
        self._own_run = own_run
        self._warned: set[str] = set()

    @classmethod
    def for_active_run(cls, began_at: float) -> "RunLogger":
        """Return a logger for the active run, or for a new one that ends with the training."""
        active = mlflow.active_run()
        run = active or mlflow.start_run()
        if active is None:
            # A training that raises does not get to `close`, and MLflow would end its run FINISHED.
            atexit.register(_end_as_failed, run.info.run_id)
        writer = RunWriter(MlflowClient(), run)
        return cls(TrackedRun(writer, began_at), own_run=active is None)

    def handle(self, event: Event) -> None:
        """Log an event: curves soon, settings at once."""
        self._tracked.handle(event)
        if isinstance(event, Started):
            source = {"memory.source": event.memory_source} if event.memory_source else {}
            self._try("tags", self._writer.tag, {"device.name": event.device.name} | source)
        if isinstance(event, Proven):
            values = event.effective.model_dump(exclude={"optimizer_state_dtypes"})
            own = {f"training.{key}": value for key, value in values.items()}
            for refused in self._try("params", self._writer.params, own) or ():
                self._warn("params", refused)

    def close(self, finished: Finished, metrics: Mapping[str, float], warnings: list[str]) -> None:
        """Log the summary, and end the run if it is ours."""
        if lost := self._tracked.close():
            self._warn("curves", str(lost))
        self._try("summary", self._writer.summary, metrics, time.time())
        tags = {"outcome": finished.outcome.value}
        if finished.outcome is not Outcome.COMPLETED:
            tags["partial"] = "true"
        if finished.memory_source:
            tags["memory.source"] = finished.memory_source
        if warnings:
            tags["warnings"] = "\n".join(warnings)
        self._try("tags", self._writer.tag, tags)
        if self._own_run:
            completed = finished.outcome is Outcome.COMPLETED
            self._try("status", mlflow.end_run, "FINISHED" if completed else "FAILED")

    def _try(self, kind: str, log: Callable[..., Any], *values: Any) -> Any:
        try:
            return log(*values)
        except MlflowException as error:
            self._warn(kind, str(error))

    def _warn(self, kind: str, reason: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning("MLflow run %s lacks %s: %s", self._writer.run_id, kind, reason)


def _end_as_failed(run_id: str) -> None:
    active = mlflow.active_run()
    if active is not None and active.info.run_id == run_id:
        with suppress(MlflowException):
            mlflow.set_tags({"outcome": Outcome.FAILED.value, "partial": "true"})
            mlflow.end_run("FAILED")
