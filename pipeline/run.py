"""One measured training = one MLflow run."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console

from pipeline import processes
from pipeline.artifacts import write_artifacts
from pipeline.config import RunConfig
from pipeline.errors import TrackingError
from pipeline.launcher import Launched, Launcher
from pipeline.progress import Progress
from pipeline.record import Event
from pipeline.report import note, verdict
from pipeline.tracking import (
    TrackedRun,
    close_stale_runs,
    connect,
    end_run,
    tracked_run,
    where_to_look,
)


def run(config: RunConfig, console: Console) -> Launched:
    """Train and measure what `config` says, in a process of its own, as one MLflow run.

    Raises TrackingError: before anything is created where the server does not answer, and at the
    end where not everything could be logged; then what is missing lies in a folder that is named.
    """
    with Launcher() as launcher:  # its imports run while MLflow's do
        client = connect()
        with tracked_run(client, config, time.time()) as tracked:
            for name in close_stale_runs(client, tracked.experiment_id):
                console.print(f"ended a run that a killed command had left open: {name}")
            launched = _measure(launcher, config, tracked, console)
            with processes.interrupts_put_off(), _ending(launched):
                _hand_in(launched, tracked, console)
            console.print(
                f"see {where_to_look(tracked.run_id, tracked.experiment_id)}", soft_wrap=True
            )
    return launched


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
def _ending(launched: Launched) -> Iterator[None]:
    """Give the MLflow run its status after the block, whatever the block meets."""
    try:
        yield
    except BaseException:
        with suppress(TrackingError):  # what the block met says more
            end_run(launched.record)
        raise
    end_run(launched.record)


def _hand_in(launched: Launched, tracked: TrackedRun, console: Console) -> None:
    """Log summary, note and files; keep them on disk where the server does not take them."""
    with tempfile.TemporaryDirectory(prefix="pipeline-") as name:
        folder = Path(name)
        write_artifacts(launched, folder)
        try:
            tracked.finish(launched.record, note(launched.record), folder)
        except TrackingError as error:
            kept = _keep(folder, tracked.run_id)
            raise TrackingError(
                f"{verdict(launched.record)}, but {error}; "
                f"record, curve and figure are in {kept.resolve()}",
                trained=True,
            ) from error


def _keep(folder: Path, run_id: str) -> Path:
    """Copy the files to where they outlive the command: here, or where everybody may write."""
    kept = Path("unlogged") / run_id
    try:
        return Path(shutil.copytree(folder, kept, dirs_exist_ok=True))
    except OSError:
        kept = Path(tempfile.mkdtemp(prefix="unlogged-"))
        return Path(shutil.copytree(folder, kept, dirs_exist_ok=True))
