"""The process that reads the memory of a training: `python -m pipeline.worker.watch`.

A thread of the training itself would need Python's lock for each reading, which costs a training
that waits for its host 3 % of its speed. So this process is torch-free and its own.

It takes an `Order` as a line of JSON on standard input and ends with that. On standard output it
writes rows of `[seconds, process, device]` in bytes, four times a second, and at last a `Verdict`.
"""

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import psutil

from pipeline import nvml

_FLUSH_SECONDS = 0.25

Row = tuple[float, int | None, int | None]


class Order(NamedTuple):
    """Which process to watch, how often, from when to count, and what was there before."""

    pid: int
    period_s: float
    origin: float
    private_before: int | None
    """The process's private bytes at the start; None for a training on a GPU."""
    gpu: nvml.Baseline | None

    @classmethod
    def parse(cls, line: str) -> "Order":
        """Return the order that `json.dumps` wrote."""
        order = cls(*json.loads(line))
        return order._replace(gpu=nvml.Baseline(*order.gpu) if order.gpu else None)


class Verdict(NamedTuple):
    """What only the end of the watching knows."""

    managed: bool = False
    late: tuple[nvml.GpuProcess, ...] = ()

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> "Verdict":
        """Return the verdict of the last line."""
        late = tuple(nvml.GpuProcess(*process) for process in values["late"])
        return cls(values["managed"], late)


class PrivateMemory:
    """The memory that goes back when a process ends.

    On Linux resident minus shared pages of /proc/PID/statm, 2 microseconds a reading. The unique
    set size of psutil differs only by pages that are shared with a parent process until they are
    written to; it takes 13 ms for 1.5 GB. Elsewhere it is psutil's.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        on_linux = sys.platform == "linux"
        self._statm = os.open(f"/proc/{pid}/statm", os.O_RDONLY) if on_linux else None
        self._page = os.sysconf("SC_PAGE_SIZE")

    def __call__(self) -> int:
        """Return bytes."""
        if self._statm is None:
            return int(psutil.Process(self._pid).memory_full_info().uss)
        _, resident, shared, *_ = os.pread(self._statm, 128, 0).split()
        return (int(resident) - int(shared)) * self._page


def main() -> None:
    """Watch until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training to decide
    order = Order.parse(sys.stdin.readline())
    with suppress(BrokenPipeError), _reader(order) as (read, verdict):
        for rows in _batches(read, order):
            print(json.dumps(rows), flush=True)
        print(json.dumps(verdict()._asdict()), flush=True)


@contextmanager
def _reader(
    order: Order,
) -> Iterator[tuple[Callable[[], tuple[int | None, int | None]], Callable[[], Verdict]]]:
    before = order.private_before
    if before is not None:
        private = PrivateMemory(order.pid)
        yield lambda: (max(private() - before, 0), None), Verdict
        return
    if order.gpu is None:  # a GPU that NVML does not know
        yield lambda: (None, None), Verdict
        return
    with nvml.session():
        gpu = nvml.GpuReader(order.gpu)

        def read() -> tuple[int, int]:
            usage = gpu.usage()
            return gpu.taken(usage), usage.used

        yield read, lambda: Verdict(gpu.managed, gpu.late_comers())


def _batches(
    read: Callable[[], tuple[int | None, int | None]], order: Order
) -> Iterator[list[Row]]:
    rows: list[Row] = []
    flushed, watched = time.perf_counter(), True
    while watched:
        ended, _, _ = select.select([0], [], [], order.period_s)
        watched = not ended
        try:
            rows.append((time.perf_counter() - order.origin, *read()))
        except ProcessLookupError:  # it was killed, and its pages are gone
            watched = False
        if time.perf_counter() - flushed > _FLUSH_SECONDS or not watched:
            yield rows
            rows, flushed = [], time.perf_counter()


if __name__ == "__main__":
    main()
