"""The MLflow run that is active in somebody's own script."""

import atexit
import time
from collections.abc import Mapping

import mlflow
from mlflow.tracking import MlflowClient

from pipeline.record import Event, Proven, Started
from pipeline.tracking import TrackedRun


class RunLogger:
    """Logs a training of somebody's own script to the MLflow run that is active there."""

    def __init__(self, tracked: TrackedRun, own_run: bool) -> None:
        self._tracked = tracked
        self._own_run = own_run

    @classmethod
    def for_active_run(cls, began_at: float) -> "RunLogger":
        """Return a logger for the active run, or for a new one that ends with the training."""
        active = mlflow.active_run()
        run = active or mlflow.start_run()
        if active is None:
            # A training that raises does not get to `close`, and MLflow would end its run FINISHED.
            atexit.register(_end_as_failed, run.info.run_id)
        return cls(TrackedRun(MlflowClient(), run, began_at), own_run=active is None)

    def handle(self, event: Event) -> None:
        """Log an event: curves soon, settings at once."""
        self._tracked.handle(event)
        if isinstance(event, Started):
            source = {"memory.source": event.memory_source} if event.memory_source else {}
            self._tracked.tag({"device.name": event.device.name} | source)
        if isinstance(event, Proven):
            values = event.effective.model_dump(exclude={"optimizer_state_dtypes"})
            self._tracked.params({f"training.{key}": value for key, value in values.items()})

    def close(self, metrics: Mapping[str, float], failed: bool) -> None:
        """Log the summary, and end the run if it is ours."""
        self._tracked.close()
        self._tracked.summary(metrics, time.time())
        if self._own_run:
            mlflow.end_run("FAILED" if failed else "FINISHED")


def _end_as_failed(run_id: str) -> None:
    active = mlflow.active_run()
    if active is not None and active.info.run_id == run_id:
        mlflow.end_run("FAILED")
