"""What MemoryCallback needs in somebody's own script: a watcher and a run to log to."""

import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from pipeline.config import Measurement
from pipeline.record import Event, Finished, Outcome, Started, Warned
from pipeline.recorder import Recorder
from pipeline.worker.memory import AllocatorPeaks, MemoryMonitor, reader
from pipeline.worker.versions import versions

if TYPE_CHECKING:
    from pipeline.script_run import RunLogger


class ScriptSession:
    """Watches memory from `open` to `close` and logs to the MLflow run that is active at `open`."""

    def __init__(self, measurement: Measurement, origin: float) -> None:
        self._measurement = measurement
        self._origin = origin
        self._resources = ExitStack()
        self._logger: RunLogger | None = None

    def open(self, device: torch.device) -> None:
        """Begin to watch this device."""
        self._recorder = Recorder(self._measurement.warmup_steps)
        # Imported when used: the worker has this module too, and knows nothing of MLflow.
        from pipeline.script_run import RunLogger

        self._logger = RunLogger.for_active_run(time.time() - time.perf_counter() + self._origin)
        # Nothing from before: model and context are there, and the driver tells our own share.
        read, described, warning = self._resources.enter_context(reader(device, {}))
        self.handle(
            Started(
                device=described,
                memory_source=read.source,
                versions=versions(),
                clock=self._origin,
            )
        )
        if warning:
            self.handle(Warned(message=warning))
        period_s = self._measurement.period_ms / 1e3
        monitor = MemoryMonitor(read, period_s, _weakly(self.handle), self._origin)
        self._resources.enter_context(monitor)
        self._read = read
        # For a training that raised, outside a `with`: the thread ends with the session's owner.
        weakref.finalize(self, monitor.request_stop)

    def handle(self, event: Event) -> None:
        """Log an event of the training."""
        if self._logger:
            self._recorder.handle(event)
            self._logger.handle(event)

    def close(self, peaks: AllocatorPeaks | None = None, *, failed: bool = False) -> None:
        """Stop watching and write the summary; without effect the second time."""
        if self._logger is None:
            return
        device = self._read()[1]
        self._resources.close()
        for message in self._read.late_comers():
            self.handle(Warned(message=message))
        logger, self._logger = self._logger, None
        finished = Finished(
            outcome=Outcome.FAILED if failed else Outcome.COMPLETED,
            end_device_bytes=device,
            peak_allocated_bytes=peaks.allocated if peaks else None,
            peak_reserved_bytes=peaks.reserved if peaks else None,
            memory_source=self._read.source,
        )
        self._recorder.handle(finished)
        logger.close(finished, self._recorder.metrics(), self._recorder.warnings)


def _weakly(handle: Callable[[Event], None]) -> Callable[[Event], None]:
    """Return a handler that does not keep its owner alive, as a thread's target would."""
    reference = weakref.WeakMethod(handle)

    def call(event: Event) -> None:
        method = reference()
        if method is not None:
            method(event)

    return call
