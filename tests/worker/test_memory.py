"""The watching thread sees short peaks, ends with its owner, and hides no error."""

import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import psutil
import pynvml
import pytest
import torch

from pipeline.record import MemorySample, Process, Samples
from pipeline.worker.memory import (
    CpuReader,
    CudaReader,
    MemoryMonitor,
    Reading,
    reader,
    used_before,
)

MB = 1_000_000
PERIOD_SECONDS = 0.005


class Sink:
    """Keeps what is flushed."""

    def __init__(self) -> None:
        self.events: list[Samples] = []

    def __call__(self, event: Samples) -> None:
        self.events.append(event)

    @property
    def rows(self) -> list[MemorySample]:
        return [row for event in self.events for row in event.rows]


def constant() -> Reading:
    return 7, None, None, None


def failing_after(count: int) -> Callable[[], Reading]:
    """Return a reader that fails once it has been asked `count` times."""
    left = iter(range(count))

    def read() -> Reading:
        if next(left, None) is None:
            raise OSError("the driver is gone")
        return constant()

    return read


def monitor(read: Callable[[], Reading], sink: Callable[[Samples], None]) -> MemoryMonitor:
    return MemoryMonitor(read, PERIOD_SECONDS, sink, time.perf_counter())


def fail_while(watching: MemoryMonitor) -> None:
    with watching:
        time.sleep(0.05)
        raise RuntimeError("out of memory")


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "memory-monitor"]


def test_as_many_readings_are_taken_as_the_period_says() -> None:
    sink = Sink()
    begun = time.perf_counter()
    with monitor(constant, sink):
        time.sleep(0.4)
    most = (time.perf_counter() - begun) / PERIOD_SECONDS + 1
    assert most / 4 <= len(sink.rows) <= most


def test_times_rise_and_count_from_the_origin() -> None:
    sink = Sink()
    with MemoryMonitor(constant, PERIOD_SECONDS, sink, time.perf_counter() - 100):
        time.sleep(0.25)
    moments = [row.seconds for row in sink.rows]
    assert all(sooner < later for sooner, later in pairwise(moments))
    assert 100 < moments[0] < moments[-1] < 110


def test_readings_are_handed_on_while_the_watching_goes_on() -> None:
    sink = Sink()
    with monitor(constant, sink):
        time.sleep(0.4)
        during = len(sink.events)
    assert 1 <= during <= 4
    assert len(sink.events) == during + 1


def test_last_reading_is_taken_at_the_end() -> None:
    sink, value = Sink(), [1]
    with MemoryMonitor(lambda: (value[0], None, None, None), 60, sink, time.perf_counter()):
        value[0] = 2
    assert [row.process for row in sink.rows] == [2]


def test_every_figure_keeps_its_place() -> None:
    sink = Sink()
    with MemoryMonitor(lambda: (1, 2, 3, 4), 60, sink, time.perf_counter()):
        pass
    [row] = sink.rows
    assert (row.process, row.device, row.allocated, row.reserved) == (1, 2, 3, 4)


def test_watching_ends_when_the_training_raises() -> None:
    sink = Sink()
    with pytest.raises(RuntimeError, match="out of memory"):
        fail_while(monitor(constant, sink))
    assert watchers() == []
    assert sink.rows


def test_error_of_the_reader_is_raised_by_the_owner() -> None:
    sink = Sink()
    with pytest.raises(OSError, match="the driver is gone"), monitor(failing_after(3), sink):
        time.sleep(0.1)
    assert watchers() == []


def test_error_of_the_receiver_is_raised_by_the_owner() -> None:
    def closed(event: Samples) -> None:
        raise BrokenPipeError("nobody listens")

    with pytest.raises(BrokenPipeError), monitor(constant, closed):
        time.sleep(0.2)


def test_error_of_the_reader_does_not_hide_the_trainings() -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        fail_while(monitor(failing_after(0), Sink()))


def test_watching_can_be_asked_to_end_without_waiting() -> None:
    watching = monitor(constant, Sink())
    with watching:
        watching.request_stop()
        deadline = time.monotonic() + 5
        while watchers() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert watchers() == []


def test_cpu_reader_sees_memory_that_is_held_for_50_ms() -> None:
    sink = Sink()
    with MemoryMonitor(CpuReader(), 0.008, sink, time.perf_counter()):
        held = np.ones(300 * MB, dtype=np.uint8)
        time.sleep(0.05)
        del held
        time.sleep(0.05)
    readings = [row.process or 0 for row in sink.rows]
    assert max(readings) >= 295 * MB
    assert readings[-1] < 100 * MB


def test_cpu_reader_agrees_with_the_unique_set_size() -> None:
    read, process = CpuReader(), psutil.Process()
    before = process.memory_full_info().uss
    held = np.ones(500 * MB, dtype=np.uint8)
    risen = process.memory_full_info().uss - before
    assert held.nbytes == 500 * MB
    assert read()[0] == pytest.approx(risen, rel=0.05)


def test_cpu_reader_leaves_out_memory_that_was_never_touched() -> None:
    read = CpuReader()
    held = np.empty(500 * MB, dtype=np.uint8)
    assert held.nbytes == 500 * MB
    assert (read()[0] or 0) < 50 * MB


def test_cpu_reader_has_no_figures_of_a_device() -> None:
    assert CpuReader()()[1:] == (None, None, None)


def test_cpu_reader_never_reads_below_zero() -> None:
    held = np.ones(200 * MB, dtype=np.uint8)
    read = CpuReader()
    del held
    assert read()[0] == 0


class Gpu:
    """As nvml.GpuReader, which has its own tests."""

    def late_comers(self) -> tuple[Process, ...]:
        return (
            Process(pid=7, name="python", bytes=300 * 1024**2),
            Process(pid=8, name="Xorg", bytes=None),
        )


def test_processes_that_came_later_are_told_with_their_share() -> None:
    gpu: Any = Gpu()
    assert CudaReader(gpu).late_comers() == (
        "another process came onto the device: python (7) with 300 MiB",
        "another process came onto the device: Xorg (8) with an unknown share",
    )
    assert CudaReader(None).late_comers() == ()


def test_cpu_is_named_as_such() -> None:
    with reader(torch.device("cpu"), {}) as (read, device, warning):
        assert read.source == "process_uss"
    assert (device.kind, device.uuid, warning) == ("cpu", None, None)
    assert device.name.startswith("CPU")
    assert device.total_bytes == psutil.virtual_memory().total


def test_asking_what_is_in_use_works_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    assert used_before() == {}
