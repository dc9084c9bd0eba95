"""When each optimizer step began and ended, on the host's clock or on the device's."""

import time
from collections import deque
from typing import NamedTuple, Protocol

import torch

from pipeline.record import StepMark


class StepClock(Protocol):
    """Marks steps as they pass; tells their times once these are known."""

    def begin(self) -> None:
        """Mark that a step's batches are there and its work begins."""

    def end(self, step: int, samples: int | None, peak_allocated: int | None) -> None:
        """Mark that a step's work was handed over."""

    def known(self, wait: bool = False) -> list[StepMark]:
        """Return the steps whose times became known since the last call; `wait` for all of them."""


class HostClock:
    """For devices that work while the host waits: the CPU."""

    def __init__(self, origin: float) -> None:
        self._origin = origin
        self._begun = time.perf_counter()
        self._marks: list[StepMark] = []

    def begin(self) -> None:
        """See StepClock."""
        self._begun = time.perf_counter()

    def end(self, step: int, samples: int | None, peak_allocated: int | None) -> None:
        """See StepClock."""
        begun, ended = self._begun - self._origin, time.perf_counter() - self._origin
        self._marks.append(StepMark(step, begun, ended, samples, peak_allocated))

    def known(self, wait: bool = False) -> list[StepMark]:
        """See StepClock."""
        marks, self._marks = self._marks, []
        return marks


class _Pending(NamedTuple):
    step: int
    begun: torch.cuda.Event
    ended: torch.cuda.Event
    samples: int | None
    peak_allocated: int | None


class CudaClock:
    """For CUDA, where the host runs ahead: events in the stream, read when they have passed.

    Never makes the host wait, so the training is not slowed by being timed. Times are chained from
    event to event, since one difference is a float32 of milliseconds.
    """

    def __init__(self, origin: float) -> None:
        self._last = _recorded()
        self._last.synchronize()
        self._last_seconds = time.perf_counter() - origin
        self._begun = self._last
        self._pending: deque[_Pending] = deque()

    def begin(self) -> None:
        """See StepClock."""
        self._begun = _recorded()

    def end(self, step: int, samples: int | None, peak_allocated: int | None) -> None:
        """See StepClock."""
        self._pending.append(_Pending(step, self._begun, _recorded(), samples, peak_allocated))

    def known(self, wait: bool = False) -> list[StepMark]:
        """See StepClock."""
        if wait and self._pending:
            self._pending[-1].ended.synchronize()
        marks = []
        while self._pending and self._pending[0].ended.query():
            item = self._pending.popleft()
            begun = self._last_seconds + self._last.elapsed_time(item.begun) / 1e3
            ended = begun + item.begun.elapsed_time(item.ended) / 1e3
            self._last, self._last_seconds = item.ended, ended
            marks.append(StepMark(item.step, begun, ended, item.samples, item.peak_allocated))
        return marks


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class BatchCounter:
    """Counts the samples of each step from the micro-batches that went through the model.

    A data set whose length is not known gives no count: the nominal batch would claim samples that
    were never trained.
    """

    def __init__(
        self, rows: int | None, micro_batch: int, drop_last: bool, world_size: int
    ) -> None:
        self._rows = rows
        self._micro_batch = micro_batch
        self._whole = drop_last
        self._world_size = world_size
        self._position = 0
        self._samples = 0

    def next_epoch(self) -> None:
        """Begin again at the first row."""
        self._position = 0

    def next_micro_batch(self) -> None:
        """Count the micro-batch that just went through."""
        if self._rows is None:
            return
        whole = self._micro_batch * self._world_size
        left = self._rows - self._position
        self._samples += whole if self._whole else min(whole, left)
        self._position += whole

    def end_step(self) -> int | None:
        """Return the samples of the step that ends here."""
        samples, self._samples = self._samples, 0
        return samples if self._rows is not None else None
