"""One measured training = one MLflow run."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

from rich.console import Console

from pipeline import processes
from pipeline.artifacts import write_artifacts
from pipeline.config import RunConfig
from pipeline.errors import TrackingError
from pipeline.foresight import Foresight
from pipeline.handover import hand_over, noting
from pipeline.launcher import Launched, Launcher
from pipeline.progress import Progress
from pipeline.record import Event
from pipeline.report import note
from pipeline.tracking import (
    Client,
    TrackedRun,
    connect,
    end_run,
    tracked_run,
    where_to_look,
)


class Ran(NamedTuple):
    """A training that came to its end, and what of it is not in MLflow."""

    run_id: str
    experiment_id: str
    launched: Launched
    unlogged: Sequence[str]
    """Why something is missing there, and where it lies instead; empty if all went well."""


def run(config: RunConfig, console: Console) -> Ran:
    """Train and measure what `config` says, in a process of its own, as one MLflow run.

    Raises TrackingError, before anything is trained, where the server does not answer.
    """
    with runner(console) as trainings:
        ran = trainings.run(config)
        console.print(f"see {where_to_look(ran.run_id, ran.experiment_id)}", soft_wrap=True)
    return ran


@contextmanager
def runner(console: Console) -> Iterator["Runner"]:
    """Yield what runs trainings; its imports go on while MLflow's do. Raises TrackingError."""
    with Launcher() as launcher:
        client = connect()
        yield Runner(launcher, client, console)


class Runner:
    """Runs trainings, one after another, each as one MLflow run, all from one fork server."""

    def __init__(self, launcher: Launcher, client: Client, console: Console) -> None:
        self.client = client
        self._launcher = launcher
        self._foresight = Foresight(launcher)
        self._console = console

    def run(
        self,
        config: RunConfig,
        name: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> Ran:
        """Train and measure; inside a `parent_run` the MLflow run becomes a child of that.

        An interrupt ends the training in order; the record says so.
        """
        unlogged: list[str] = []
        with tracked_run(self.client, config, time.time(), name, tags) as tracked:
            launched = _measure(self._launcher, config, tracked, self._console)
            with processes.interrupts_put_off(), _ending(launched, unlogged):
                with noting(unlogged, "no prediction: "):
                    launched = launched._replace(record=self._foresight.beside(launched.record))
                record = launched.record
                unlogged += hand_over(
                    partial(write_artifacts, launched),
                    partial(tracked.finish, record, note(record)),
                    tracked.writer.run_id,
                )
        writer = tracked.writer
        return Ran(writer.run_id, writer.experiment_id, launched, unlogged)


def _measure(
    launcher: Launcher, config: RunConfig, tracked: TrackedRun, console: Console
) -> Launched:
    with Progress(console) as progress:

        def handle(event: Event) -> None:
            tracked.handle(event)
            progress.handle(event)

        launcher.warm()
        return launcher.launch(config, handle)


@contextmanager
def _ending(launched: Launched, unlogged: list[str]) -> Iterator[None]:
    """Give the MLflow run its status after the block, whatever the block meets."""
    try:
        yield
    except BaseException:
        with suppress(TrackingError):  # what the block met says more
            end_run(launched.record)
        raise
    with noting(unlogged):
        end_run(launched.record)
