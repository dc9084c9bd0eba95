"""The watcher in somebody's own script, with fakes for the device and the run."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pipeline import script_run
from pipeline.config import Measurement
from pipeline.record import Device, Event
from pipeline.worker import script
from pipeline.worker.memory import CpuReader


class NoCard(CpuReader):
    """Stands for the reader of a card that is not there."""

    source = "nvml_process"


class Logger:
    """As RunLogger, for a run that is not there."""

    events: list[Event]

    @classmethod
    def for_active_run(cls, began_at: float) -> "Logger":
        return cls()

    def handle(self, event: Event) -> None:
        pass

    def close(self, *args: Any) -> None:
        pass


def test_what_is_in_use_at_the_begin_of_training_is_not_called_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Model and context are there by then: taken off, the headline would miss both."""
    asked: list[Mapping[str, Any]] = []

    @contextmanager
    def reader(device: torch.device, before: Mapping[str, Any]) -> Iterator[Any]:
        asked.append(before)
        yield NoCard(), Device(kind="cuda", name="NVIDIA H200"), None

    monkeypatch.setattr(script, "reader", reader)
    monkeypatch.setattr(script_run, "RunLogger", Logger)
    session = script.ScriptSession(Measurement(), 0.0)
    session.open(torch.device("cuda"))
    session.close()
    assert asked == [{}]
