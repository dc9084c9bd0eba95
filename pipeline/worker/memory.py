"""Read memory, and watch it from a thread."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import psutil
import torch

from pipeline import nvml
from pipeline.record import MIB, Device, MemorySample, MemorySource, Samples

Reading = tuple[int | None, int | None, int | None, int | None]
"""process, device, allocated, reserved: bytes, or None where there is no such figure."""

_FLUSH_SECONDS = 0.25
# The allocator's own figures cost three times an NVML reading, so they are read less often; their
# peaks are exact all the same, since torch keeps those itself.
_ALLOCATOR_EVERY = 4


class MemoryMonitor:
    """Polls `read` on a thread and hands the samples on, four times a second.

    `on_flush` is called on that thread with a `Samples` event; it has to be quick. An error of
    either ends the watching and is raised by `__exit__`, unless something else is being raised.
    """

    def __init__(
        self,
        read: Callable[[], Reading],
        period_s: float,
        on_flush: Callable[[Samples], None],
        origin: float,
    ) -> None:
        self._read = read
        self._period_s = period_s
        self._on_flush = on_flush
        self._origin = origin
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._watch, name="memory-monitor", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
        if self._error is not None and error is None:
            raise self._error

    def stop(self) -> None:
        """End the thread, after a last reading."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def request_stop(self) -> None:
        """End the thread soon, without waiting for it."""
        self._stop.set()

    def _sample(self) -> MemorySample:
        return MemorySample(time.perf_counter() - self._origin, *self._read())

    def _watch(self) -> None:
        try:
            rows: list[MemorySample] = []
            flushed = time.perf_counter()
            while not self._stop.wait(self._period_s):
                rows.append(self._sample())
                if time.perf_counter() - flushed > _FLUSH_SECONDS:
                    self._on_flush(Samples.model_construct(rows=tuple(rows)))
                    rows, flushed = [], time.perf_counter()
            rows.append(self._sample())
            self._on_flush(Samples(rows=tuple(rows)))
        except BaseException as error:
            self._error = error


class CpuReader:
    """The process's private memory above where it stood: what goes back when the process ends.

    On Linux resident minus shared pages of /proc/self/statm, 2 microseconds a reading. The unique
    set size of psutil differs only by pages that are shared with a parent process until they are
    written to; it takes 13 ms for 1.5 GB. Elsewhere it is psutil's.
    """

    source: MemorySource = "process_uss"

    def __init__(self) -> None:
        self._statm = os.open("/proc/self/statm", os.O_RDONLY) if sys.platform == "linux" else None
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._start = self._private()

    def late_comers(self) -> tuple[str, ...]:
        """Say nothing: what other processes hold is theirs, here."""
        return ()

    def _private(self) -> int:
        if self._statm is None:
            return int(psutil.Process().memory_full_info().uss)
        _, resident, shared, *_ = os.pread(self._statm, 128, 0).split()
        return (int(resident) - int(shared)) * self._page

    def __call__(self) -> Reading:
        return max(self._private() - self._start, 0), None, None, None


class CudaReader:
    """NVML's figures for this process and its device, with the allocator's now and then."""

    def __init__(self, gpu: nvml.GpuReader | None) -> None:
        self._gpu = gpu
        self._count = 0

    @property
    def source(self) -> MemorySource | None:
        """Where the headline comes from, as far as the readings up to now tell."""
        if self._gpu is None:
            return None
        return "nvml_process" if self._gpu.sees_process and not self._gpu.managed else "nvml_device"

    def late_comers(self) -> tuple[str, ...]:
        """Say which other processes came onto the device meanwhile: they spoil the measurement."""
        return tuple(
            f"another process came onto the device: {other.name} ({other.pid}) with "
            + (f"{other.bytes / MIB:.0f} MiB" if other.bytes else "an unknown share")
            for other in (self._gpu.late_comers() if self._gpu else ())
        )

    def __call__(self) -> Reading:
        process = device = allocated = reserved = None
        if self._gpu is not None:
            usage = self._gpu.usage()
            process, device = self._gpu.taken(usage), usage.used
        if self._count % _ALLOCATOR_EVERY == 0:
            stats = torch.cuda.memory_stats_as_nested_dict()
            allocated = stats["allocated_bytes"]["all"]["current"]
            reserved = stats["reserved_bytes"]["all"]["current"]
        self._count += 1
        return process, device, allocated, reserved


class AllocatorPeaks:
    """The high-water marks that torch's CUDA allocator keeps: exact, whatever the sampling."""

    def __init__(self) -> None:
        self.allocated = 0
        self.reserved = 0

    def lap(self) -> int:
        """Return the peak of allocated bytes since the last call, and start anew."""
        stats = torch.cuda.memory_stats_as_nested_dict()
        peak = int(stats["allocated_bytes"]["all"]["peak"])
        self.allocated = max(self.allocated, peak)
        self.reserved = max(self.reserved, int(stats["reserved_bytes"]["all"]["peak"]))
        torch.cuda.reset_peak_memory_stats()
        return peak


def used_before() -> dict[str, nvml.DeviceUsage]:
    """Return what is in use on every GPU, by UUID. To be asked before the first CUDA call."""
    with nvml.session() as available:
        return nvml.usage_by_uuid() if available else {}


@contextmanager
def reader(
    device: torch.device, before: Mapping[str, nvml.DeviceUsage]
) -> Iterator[tuple[CpuReader | CudaReader, Device, str | None]]:
    """Yield a reader of this device, what the device is, and a warning if NVML cannot be matched.

    `before` is what `used_before` said: what the device held then is not ours.
    """
    if device.type == "cpu":
        yield CpuReader(), Device(kind="cpu", name=_cpu_name(), total_bytes=_ram()), None
        return
    with nvml.session() as available:
        torch.zeros(1, device=device)  # creates the context, so that the driver lists us
        properties = torch.cuda.get_device_properties(device)
        uuid, warning, gpu = str(properties.uuid), None, None
        try:
            held = torch.cuda.memory_reserved(device)
            gpu = nvml.GpuReader(uuid, before, os.getpid(), held) if available else None
            warning = gpu.warning if gpu else None
        except LookupError as error:
            warning = f"no NVML memory curve: {error}"
        if not available:
            warning = "no NVML memory curve: the NVIDIA management library is not there"
        yield (
            CudaReader(gpu),
            Device(
                kind="cuda",
                name=properties.name,
                uuid=gpu.uuid if gpu else uuid,
                total_bytes=gpu.total_bytes if gpu else properties.total_memory,
                processes=gpu.other_processes() if gpu else (),
            ),
            warning,
        )


def _cpu_name() -> str:
    """Return the processor's marketing name where the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            found = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    except OSError:
        found = []
    return f"CPU {found[0].strip()}" if found else "CPU"


def _ram() -> int:
    return int(psutil.virtual_memory().total)
