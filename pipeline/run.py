"""One measured training = one MLflow run."""

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from pipeline import processes
from pipeline.artifacts import write_artifacts
from pipeline.config import RunConfig
from pipeline.errors import TrackingError
from pipeline.launcher import Launched, Launcher
from pipeline.progress import Progress
from pipeline.record import Event
from pipeline.report import note
from pipeline.tracking import (
    TrackedRun,
    close_stale_runs,
    connect,
    end_run,
    tracked_run,
    where_to_look,
)


class Ran(NamedTuple):
    """A training that came to its end, and what of it is not in MLflow."""

    launched: Launched
    unlogged: Sequence[str]
    """Why something is missing there, and where it lies instead; empty if all went well."""


def run(config: RunConfig, console: Console) -> Ran:
    """Train and measure what `config` says, in a process of its own, as one MLflow run.

    Raises TrackingError, before anything is trained, where the server does not answer.
    """
    unlogged: list[str] = []
    with Launcher() as launcher:  # its imports run while MLflow's do
        client = connect()
        with tracked_run(client, config, time.time()) as tracked:
            for name in close_stale_runs(client, tracked.experiment_id):
                console.print(f"ended a run that a killed command had left open: {name}")
            launched = _measure(launcher, config, tracked, console)
            with processes.interrupts_put_off(), _ending(launched, unlogged):
                _hand_in(launched, tracked, unlogged)
            console.print(
                f"see {where_to_look(tracked.run_id, tracked.experiment_id)}", soft_wrap=True
            )
    return Ran(launched, unlogged)


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
    with _noting(unlogged):
        end_run(launched.record)


def _hand_in(launched: Launched, tracked: TrackedRun, unlogged: list[str]) -> None:
    """Log summary, note and files; keep them on disk where the server does not take them."""
    record, folder = launched.record, None
    with ExitStack() as stack:
        with _noting(unlogged, "the files could not all be written: "):
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix="pipeline-"))
            folder = Path(name)
            write_artifacts(launched, folder)
        with _noting(unlogged):
            tracked.finish(record, note(record), folder)
        if unlogged and folder:
            with _noting(unlogged, "they could not be kept either: "):
                kept = _keep(folder, tracked.run_id)
                unlogged.append(f"record, curve and figure are in {kept.resolve()}")


@contextmanager
def _noting(problems: list[str], what: str = "") -> Iterator[None]:
    """Note what the block raises: a measurement is not lost with a full disk or a figure."""
    try:
        yield
    except Exception as error:
        problems.append(f"{what}{str(error) or type(error).__name__}")


def _keep(folder: Path, run_id: str) -> Path:
    """Copy the files to where they outlive the command: here, or where everybody may write."""
    kept = Path("unlogged") / run_id
    try:
        return Path(shutil.copytree(folder, kept, dirs_exist_ok=True))
    except OSError:
        kept = Path(tempfile.mkdtemp(prefix="unlogged-"))
        return Path(shutil.copytree(folder, kept, dirs_exist_ok=True))
