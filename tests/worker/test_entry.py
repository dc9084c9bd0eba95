"""What the worker tells its parent, in this process."""

from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch

from pipeline.presets import resolve
from pipeline.record import Event, Finished, Outcome, Started, Warned
from pipeline.worker import entry
from pipeline.worker.memory import CpuReader


class Connection:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def send(self, events: list[Event]) -> None:
        self.events += events

    def close(self) -> None:
        pass


class Peaks:
    """As AllocatorPeaks, on a card that is not there."""

    allocated, reserved = 100, 200

    def lap(self) -> int:
        self.allocated, self.reserved = 300, 400
        return 300


class LostPeaks(Peaks):
    """As AllocatorPeaks after an error that CUDA does not recover from."""

    def lap(self) -> int:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def run(tiny_model: str) -> Callable[[], list[Event]]:
    settings = {"device": "cpu", "model": tiny_model, "seq_len": 8, "samples": 8}
    config = resolve("adamw", "laptop", settings)

    def events() -> list[Event]:
        connection: Any = Connection()
        entry.main(config.model_dump_json(), connection, 0.0)
        assert isinstance(connection.events[0], Started)
        return list(connection.events)

    return events


def fail(*args: Any) -> NoReturn:
    raise KeyError("no such layer")


def test_failure_to_count_operations_is_a_warning_and_loses_nothing(
    run: Callable[[], list[Event]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry, "flops_per_sample", fail)
    events = run()
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert (finished.outcome, finished.flops_per_sample) == (Outcome.COMPLETED, None)
    assert finished.metrics["train_loss"] > 0
    assert finished.memory_source == "process_uss"
    [warning] = [event.message for event in events if isinstance(event, Warned)]
    assert warning.startswith("no tflops and no mfu: counting failed: KeyError")


@pytest.mark.parametrize(("peaks", "kept"), [(Peaks, (300, 400)), (LostPeaks, (100, 200))])
def test_training_that_runs_out_of_memory_keeps_the_allocators_peaks(
    run: Callable[[], list[Event]],
    monkeypatch: pytest.MonkeyPatch,
    peaks: type[Peaks],
    kept: tuple[int, int],
) -> None:
    def build(config: Any, device: Any, callback: Any, folder: str) -> NoReturn:
        callback.peaks = peaks()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(entry, "build_trainer", build)
    finished = run()[-1]
    assert isinstance(finished, Finished)
    assert finished.outcome is Outcome.OUT_OF_MEMORY
    assert (finished.peak_allocated_bytes, finished.peak_reserved_bytes) == kept


def test_processes_that_came_later_are_warned_of_after_a_failure_too(
    run: Callable[[], list[Event]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry, "build_trainer", fail)
    monkeypatch.setattr(CpuReader, "late_comers", lambda self: ("another process came",))
    assert [event.message for event in run() if isinstance(event, Warned)] == [
        "another process came"
    ]


def test_training_that_fails_before_it_has_peaks_has_none(
    run: Callable[[], list[Event]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry, "build_trainer", fail)
    finished = run()[-1]
    assert isinstance(finished, Finished)
    assert finished.message == "KeyError: 'no such layer'"
    assert finished.peak_allocated_bytes is None
