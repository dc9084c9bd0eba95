"""The watching sees short peaks, ends with its owner, and hides no error."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import psutil
import pynvml
import pytest
import torch

from pipeline import nvml
from pipeline.record import MemorySample, Samples
from pipeline.worker.memory import (
    CpuReader,
    CudaReader,
    MemoryMonitor,
    reader,
    used_before,
)
from pipeline.worker.watch import Order, Verdict

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


class Reader(CpuReader):
    """Reads this process; its allocator holds what a test says."""

    def __init__(self, allocator: tuple[int | None, int | None] = (None, None)) -> None:
        super().__init__()
        self._allocator = allocator

    def allocator(self) -> tuple[int | None, int | None]:
        return self._allocator


class LostReader(CpuReader):
    """Has a device watched that is not there."""

    def order(self, period_s: float, origin: float) -> Order:
        nowhere = nvml.Baseline("GPU-0", 1, 0, 0, (), ())
        return Order(os.getpid(), period_s, origin, None, nowhere)


def monitor(
    sink: Callable[[Samples], None], read: CpuReader | None = None, origin: float | None = None
) -> MemoryMonitor:
    begun = time.perf_counter() if origin is None else origin
    return MemoryMonitor(read or CpuReader(), PERIOD_SECONDS, sink, begun)


def is_watching(sink: Sink) -> bool:
    """Wait until the other process has begun."""
    deadline = time.monotonic() + 30
    while len(sink.events) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(sink.events) >= 2


def fail_while(watching: MemoryMonitor) -> None:
    with watching:
        raise RuntimeError("out of memory")


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "memory-monitor"]


def test_as_many_readings_are_taken_as_the_period_says() -> None:
    sink = Sink()
    with monitor(sink):
        assert is_watching(sink)
        time.sleep(0.6)
    moments = [row.seconds for row in sink.rows[1:]]
    most = (moments[-1] - moments[0]) / PERIOD_SECONDS + 1
    assert most / 4 <= len(moments) <= most


def test_times_rise_and_count_from_the_origin() -> None:
    sink = Sink()
    with monitor(sink, origin=time.perf_counter() - 100):
        assert is_watching(sink)
    moments = [row.seconds for row in sink.rows]
    assert all(sooner <= later for sooner, later in pairwise(moments))
    assert 100 < moments[0] < moments[-1] < 130


def test_first_reading_does_not_wait_for_the_other_process() -> None:
    sink = Sink()
    with monitor(sink):
        assert len(sink.rows) == 1


def test_readings_are_handed_on_four_times_a_second() -> None:
    sink = Sink()
    with monitor(sink):
        assert is_watching(sink)
        before = len(sink.events)
        time.sleep(1.0)
        during = len(sink.events) - before
    assert 2 <= during <= 5


def test_last_reading_is_taken_at_the_end() -> None:
    sink = Sink()
    with monitor(sink):
        assert is_watching(sink)
        held = np.ones(100 * MB, dtype=np.uint8)
    assert held.nbytes == 100 * MB
    assert (sink.rows[-1].process or 0) > 95 * MB


def test_allocator_is_read_beside_the_process() -> None:
    sink = Sink()
    with monitor(sink, Reader(allocator=(3, 4))):
        assert is_watching(sink)
    read = [row for row in sink.rows if row.process is None]
    assert read
    assert {(row.device, row.allocated, row.reserved) for row in read} == {(None, 3, 4)}


def test_watching_ends_when_the_training_raises() -> None:
    sink, watching = Sink(), None
    watching = monitor(sink)
    with pytest.raises(RuntimeError, match="out of memory"):
        fail_while(watching)
    assert watchers() == []
    assert watching.watcher.returncode == 0
    assert sink.rows


def test_watcher_that_breaks_down_is_an_error_of_the_owner() -> None:
    with (
        pytest.raises(ChildProcessError, match="reads the memory ended with code 1"),
        monitor(Sink(), LostReader()) as watching,
    ):
        watching.watcher.wait()
    assert watchers() == []


def test_watcher_that_is_killed_is_an_error_of_the_owner() -> None:
    with pytest.raises(ChildProcessError, match="-9"), monitor(Sink()) as watching:
        watching.watcher.kill()


def test_error_of_the_receiver_is_raised_by_the_owner() -> None:
    events: list[Samples] = []

    def closes(event: Samples) -> None:
        events.append(event)
        if len(events) > 1:
            raise BrokenPipeError("nobody listens")

    with pytest.raises(BrokenPipeError), monitor(closes) as watching:
        watching.watcher.wait()


def test_error_of_the_watching_does_not_hide_the_trainings() -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        fail_while(monitor(Sink(), LostReader()))


def test_watching_can_be_asked_to_end_without_waiting() -> None:
    with monitor(Sink()) as watching:
        watching.request_stop()
        deadline = time.monotonic() + 30
        while watchers() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert watchers() == []


def test_memory_that_is_held_for_50_ms_is_seen() -> None:
    sink = Sink()
    with MemoryMonitor(CpuReader(), 0.008, sink, time.perf_counter()):
        assert is_watching(sink)
        held = np.ones(300 * MB, dtype=np.uint8)
        time.sleep(0.05)
        del held
        time.sleep(0.05)
    readings = [row.process or 0 for row in sink.rows]
    assert max(readings) >= 295 * MB
    assert readings[-1] < 100 * MB


def test_watcher_ends_with_a_training_that_is_killed() -> None:
    code = (
        "import os, time; from pipeline.worker.memory import CpuReader, MemoryMonitor; "
        "watching = MemoryMonitor(CpuReader(), 0.01, lambda event: None, 0.0).__enter__(); "
        "print(watching.watcher.pid, flush=True); time.sleep(60)"
    )
    training = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert training.stdout
    watcher = psutil.Process(int(training.stdout.readline()))
    training.kill()
    training.wait()
    assert psutil.wait_procs([watcher], timeout=30)[1] == []


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
    assert CpuReader()()[1] is None
    assert CpuReader().allocator() == (None, None)


def test_cpu_reader_never_reads_below_zero() -> None:
    held = np.ones(200 * MB, dtype=np.uint8)
    read = CpuReader()
    del held
    assert read()[0] == 0


def test_processes_that_came_later_are_told_with_their_share() -> None:
    read = CudaReader(None)
    assert read.late_comers() == ()
    late = (nvml.GpuProcess(7, "python", 300 * 1024**2), nvml.GpuProcess(8, "Xorg", None))
    read.learn(Verdict(late=late))
    assert read.late_comers() == (
        "another process came onto the device: python (7) with 300 MiB",
        "another process came onto the device: Xorg (8) with an unknown share",
    )


def test_order_and_verdict_survive_their_journey() -> None:
    start = nvml.Baseline("GPU-1", 5, 7, 8, (5, 6), (5,))
    order = Order(5, 0.008, 12.5, None, start)
    assert Order.parse(json.dumps(order)).gpu.uuid == "GPU-1"  # type: ignore[union-attr]
    assert Order.parse(json.dumps(order))[:4] == order[:4]
    verdict = Verdict(True, (nvml.GpuProcess(7, "python", None),))
    assert Verdict.parse(json.loads(json.dumps(verdict._asdict()))) == verdict


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
