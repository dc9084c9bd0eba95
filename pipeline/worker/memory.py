"""Read this process's memory, and have it watched."""

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import torch

from pipeline import nvml
from pipeline.record import MIB, Device, MemorySample, MemorySource, Process, Samples
from pipeline.worker.watch import Order, PrivateMemory, Verdict

Reading = tuple[int | None, int | None]
"""process, device: bytes, or None where there is no such figure."""

# Readings of torch's allocator need the training's own process, and so its lock; the peaks are
# exact all the same, since torch keeps those itself.
_ALLOCATOR_SECONDS = 0.05
_SECONDS = attrgetter("seconds")
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


class MemoryMonitor:
    """Has another process watch this one, and hands the samples on, four times a second.

    `on_flush` is called with `Samples` on a thread that waits for them; it has to be quick. An
    error of either ends the watching and is raised by `__exit__`, unless something else is raised.
    """

    def __init__(
        self,
        read: "CpuReader | CudaReader",
        period_s: float,
        on_flush: Callable[[Samples], None],
        origin: float,
    ) -> None:
        self._read = read
        self._on_flush = on_flush
        self._origin = origin
        self._order = read.order(period_s, origin)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._gather, name="memory-monitor", daemon=True)

    def __enter__(self) -> Self:
        path = os.pathsep.join(filter(None, (_PACKAGE_ROOT, os.environ.get("PYTHONPATH"))))
        self.watcher = subprocess.Popen(
            [sys.executable, "-m", "pipeline.worker.watch"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        assert self.watcher.stdin
        self.watcher.stdin.write(json.dumps(self._order) + "\n")
        self.watcher.stdin.flush()
        # The other process needs a moment to start; what is there by now is read here.
        self._on_flush(Samples(rows=(self._sample(),)))
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
        """End the watching, after a last reading."""
        self.request_stop()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        self.watcher.wait()

    def request_stop(self) -> None:
        """End the watching soon, without waiting for it."""
        assert self.watcher.stdin
        with suppress(OSError):  # it ended before
            self.watcher.stdin.close()

    def _sample(self) -> MemorySample:
        seconds = time.perf_counter() - self._origin
        return MemorySample(seconds, *self._read(), *self._read.allocator())

    def _gather(self) -> None:
        """Hand on what the watcher reads until it ends; without a verdict it broke down."""
        try:
            verdict, rows = None, list[MemorySample]()
            while line := self._next_line(rows):
                content = json.loads(line)
                if isinstance(content, dict):
                    verdict = Verdict.parse(content)
                    continue
                rows += [MemorySample(*row) for row in content]
                self._on_flush(Samples.model_construct(rows=tuple(sorted(rows, key=_SECONDS))))
                rows = []
            if verdict is None:
                code = self.watcher.wait()
                raise ChildProcessError(f"the process that reads the memory ended with code {code}")
            self._read.learn(verdict)
        except BaseException as error:
            self._error = error
            self.watcher.kill()  # it may be waiting for somebody to take its lines

    def _next_line(self, rows: list[MemorySample]) -> str:
        """Return the watcher's next line; read the allocator while there is none."""
        assert self.watcher.stdout
        while not select.select([self.watcher.stdout], [], [], _ALLOCATOR_SECONDS)[0]:
            allocated, reserved = self._read.allocator()
            if allocated is not None:
                seconds = time.perf_counter() - self._origin
                rows.append(MemorySample(seconds, None, None, allocated, reserved))
        return self.watcher.stdout.readline()


class CpuReader:
    """The process's private memory above where it stood: what goes back when the process ends."""

    source: MemorySource = "process_uss"

    def __init__(self) -> None:
        self._private = PrivateMemory(os.getpid())
        self._start = self._private()

    def __call__(self) -> Reading:
        return max(self._private() - self._start, 0), None

    def order(self, period_s: float, origin: float) -> Order:
        """Return how another process reads the same."""
        return Order(os.getpid(), period_s, origin, self._start, None)

    def allocator(self) -> tuple[int | None, int | None]:
        """Return nothing: torch keeps no account of the CPU's memory."""
        return None, None

    def learn(self, verdict: Verdict) -> None:
        """Take in nothing: what other processes hold is theirs, here."""

    def late_comers(self) -> tuple[str, ...]:
        """Say nothing, likewise."""
        return ()


class CudaReader:
    """NVML's figures for this process and its device, and the allocator's own."""

    def __init__(self, gpu: nvml.GpuReader | None) -> None:
        self._gpu = gpu
        self._verdict = Verdict()

    @property
    def source(self) -> MemorySource | None:
        """Where the headline comes from, as far as it is known by now."""
        if self._gpu is None:
            return None
        managed = self._verdict.managed or self._gpu.managed
        return "nvml_process" if self._gpu.sees_process and not managed else "nvml_device"

    def __call__(self) -> Reading:
        if self._gpu is None:
            return None, None
        usage = self._gpu.usage()
        return self._gpu.taken(usage), usage.used

    def order(self, period_s: float, origin: float) -> Order:
        """Return how another process reads the same."""
        gpu = self._gpu.start if self._gpu else None
        return Order(os.getpid(), period_s, origin, None, gpu)

    def allocator(self) -> tuple[int | None, int | None]:
        """Return allocated and reserved bytes."""
        stats = torch.cuda.memory_stats_as_nested_dict()
        return stats["allocated_bytes"]["all"]["current"], stats["reserved_bytes"]["all"]["current"]

    def learn(self, verdict: Verdict) -> None:
        """Take in what the watching found."""
        self._verdict = verdict

    def late_comers(self) -> tuple[str, ...]:
        """Say which other processes came onto the device meanwhile: they spoil the measurement."""
        return tuple(
            f"another process came onto the device: {other.name} ({other.pid}) with "
            + (f"{other.bytes / MIB:.0f} MiB" if other.bytes else "an unknown share")
            for other in self._verdict.late
        )


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
        uuid, warning, start = str(properties.uuid), None, None
        try:
            held = torch.cuda.memory_reserved(device)
            start = nvml.baseline(uuid, before, os.getpid(), held) if available else None
        except LookupError as error:
            warning = f"no NVML memory curve: {error}"
        if not available:
            warning = "no NVML memory curve: the NVIDIA management library is not there"
        gpu = nvml.GpuReader(start) if start else None
        described = Device(
            kind="cuda",
            name=properties.name,
            uuid=gpu.uuid if gpu else uuid,
            total_bytes=gpu.total_bytes if gpu else properties.total_memory,
            processes=tuple(
                Process(**other._asdict()) for other in (gpu.other_processes() if gpu else ())
            ),
        )
        yield CudaReader(gpu), described, gpu.warning if gpu else warning


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
