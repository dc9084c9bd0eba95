"""Writes to one MLflow run: params, metrics, tags, files, within the limits of MLflow."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from pipeline.curves import Point

_METRICS_PER_BATCH = 1000
_PARAMS_PER_BATCH = 100
_PARAM_LENGTH = 6000
_TAG_LENGTH = 8000

NOTE = "mlflow.note.content"
_HOW_TO_READ = """Trainings with Hugging Face's Trainer, measured: memory and throughput.

A run without children is one training: its note has the figures, *Model metrics* the curves
(`memory/`, `step/`, `ledger/`), *Artifacts* the record and `memory.png`. `compare ...` and
`search ...` are parents: press [+] for their trainings, and open their `.html` under *Artifacts*.
Useful columns: `peak_memory_mib`, `samples_per_second`, `preset.name`, `outcome`.
"""


class RunWriter:
    """Writes to a run that is there. Raises MlflowException where the server does not take it."""

    def __init__(self, client: MlflowClient, run: Any) -> None:
        self.run_id: str = run.info.run_id
        self.experiment_id: str = run.info.experiment_id
        self._client = client

    def points(self, points: Sequence[Point]) -> None:
        """Log points of curves."""
        metrics = [Metric(*point) for point in points]
        for begin in range(0, len(metrics), _METRICS_PER_BATCH):
            batch = metrics[begin : begin + _METRICS_PER_BATCH]
            self._client.log_batch(self.run_id, metrics=batch)

    def summary(self, metrics: Mapping[str, float], ended_at: float) -> None:
        """Log figures that stand for the whole run."""
        at = round(ended_at * 1e3)
        self.points([Point(key, value, at, 0) for key, value in metrics.items()])

    def tag(self, tags: Mapping[str, str]) -> None:
        """Set tags."""
        entities = [RunTag(key, str(value)[:_TAG_LENGTH]) for key, value in tags.items()]
        self._client.log_batch(self.run_id, tags=entities)

    def note(self, markdown: str) -> None:
        """Set the text that the UI shows on the run's page."""
        self.tag({NOTE: markdown})

    def artifacts(self, folder: Path) -> None:
        """Upload the files of a folder."""
        self._client.log_artifacts(self.run_id, str(folder))

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


def summary_of(client: MlflowClient, run_id: str) -> dict[str, float]:
    """Return a run's summary figures, without its curves; none of a run that is not there."""
    try:
        metrics = client.get_run(run_id).data.metrics
    except MlflowException:
        return {}
    return {name: value for name, value in metrics.items() if "/" not in name}


def fetch(client: MlflowClient, run_id: str, name: str, folder: Path) -> None:
    """Copy a file of a run into a folder, if the run has it and is there."""
    with suppress(MlflowException, OSError):
        client.download_artifacts(run_id, name, str(folder))


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(dict(value)) if isinstance(value, Mapping) else str(value)


def describe_experiment(client: MlflowClient, experiment_id: str) -> None:
    """Say at the head of the experiment how to read it, unless somebody wrote something there."""
    if NOTE not in client.get_experiment(experiment_id).tags:
        client.set_experiment_tag(experiment_id, NOTE, _HOW_TO_READ)
