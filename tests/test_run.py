"""What becomes of a training that was measured and cannot be handed in whole."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline import run as module
from pipeline.config import RunConfig
from pipeline.errors import TrackingError
from pipeline.launcher import Launched
from pipeline.record import Outcome, RunRecord
from pipeline.recorder import Recorder
from pipeline.run import run


class FakeRun:
    """An MLflow run that remembers what it was handed."""

    run_id, experiment_id = "the-run", "0"

    def __init__(self, error: TrackingError | None) -> None:
        self.writer = self
        self.error = error
        self.files: list[str] = []

    def finish(self, record: RunRecord, note: str, artifacts: Path) -> None:
        self.files = sorted(path.name for path in artifacts.iterdir())
        if self.error:
            raise self.error


@pytest.fixture
def launched(config: RunConfig) -> Launched:
    record = RunRecord(
        config=config, outcome=Outcome.COMPLETED, started_at=time.time(), ended_at=time.time()
    )
    return Launched(record, Recorder(warmup_steps=1), "")


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, launched: Launched, tmp_path: Path) -> list[RunRecord]:
    """Have `run` measure nothing and talk to nobody; return the records whose run was ended."""
    found: list[RunRecord] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "connect", lambda: None)
    monkeypatch.setattr(module, "_measure", lambda *_: launched)
    monkeypatch.setattr(module, "end_run", found.append)
    return found


def tracked(monkeypatch: pytest.MonkeyPatch, error: TrackingError | None = None) -> FakeRun:
    fake = FakeRun(error)

    @contextmanager
    def tracked_run(*_: Any) -> Iterator[FakeRun]:
        yield fake

    monkeypatch.setattr(module, "tracked_run", tracked_run)
    return fake


def test_figure_that_fails_costs_neither_summary_nor_status(
    monkeypatch: pytest.MonkeyPatch, config: RunConfig, launched: Launched, ended: list[RunRecord]
) -> None:
    def write(_: Launched, folder: Path) -> None:
        (folder / "record.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_artifacts", write)
    fake = tracked(monkeypatch)
    ran = run(config, Console(quiet=True))
    assert ran.launched == launched
    assert fake.files == ["record.json"]
    assert ended == [launched.record]
    first, *_ = ran.unlogged
    assert "No space left on device" in first


def test_files_that_the_server_does_not_take_are_kept(
    monkeypatch: pytest.MonkeyPatch, config: RunConfig, ended: list[RunRecord], tmp_path: Path
) -> None:
    tracked(monkeypatch, TrackingError("the server is gone"))
    ran = run(config, Console(quiet=True))
    kept = tmp_path / "unlogged" / "the-run"
    assert list(ran.unlogged) == [
        "the server is gone",
        f"record, curve and figure are in {kept}",
    ]
    assert (kept / "record.json").is_file()
    assert len(ended) == 1


def test_run_that_cannot_be_ended_is_told(
    monkeypatch: pytest.MonkeyPatch, config: RunConfig, ended: list[RunRecord]
) -> None:
    def fail(_: RunRecord) -> None:
        raise TrackingError("the run is still open")

    monkeypatch.setattr(module, "end_run", fail)
    tracked(monkeypatch)
    assert run(config, Console(quiet=True)).unlogged == ["the run is still open"]
