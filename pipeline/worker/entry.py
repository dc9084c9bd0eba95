"""The worker: build the training, measure it, tell the parent what happens as it happens."""

import tempfile
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection

import torch
import transformers

from pipeline.config import RunConfig
from pipeline.errors import ConfigError, NotInEffectError, UnsupportedError
from pipeline.record import MIB, Event, Finished, Outcome, Proven, Started, Warned
from pipeline.worker.callback import MemoryCallback
from pipeline.worker.flops import flops_per_sample, peak_flops
from pipeline.worker.limit import cap_allocator, check_taken
from pipeline.worker.memory import MemoryMonitor, reader, used_before
from pipeline.worker.proof import check
from pipeline.worker.support import require
from pipeline.worker.training import build_trainer
from pipeline.worker.versions import versions

# Out of memory comes in more forms than torch.OutOfMemoryError: from the driver, from cuBLAS, which
# could not make its workspace, and from bitsandbytes.
_OUT_OF_MEMORY_WORDS = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "can't allocate memory",
    "Cannot allocate memory",
)


class Stream:
    """The way to the parent. `post` is cheap and for the training; `flush` sends what has come."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._waiting: list[Event] = []

    def post(self, event: Event) -> None:
        """Keep an event for the next flush."""
        self._waiting.append(event)  # atomic, so the training never waits for a lock

    def flush(self, *last: Event) -> None:
        """Send what was posted, and these."""
        with self._lock:
            count = len(self._waiting)
            batch = self._waiting[:count]
            del self._waiting[:count]
            self._connection.send([*batch, *last])


def main(config_json: str, connection: Connection, requested: float) -> None:
    """Train what the configuration says. The last event tells how it ended."""
    stream = Stream(connection)
    try:
        finished = _measure(RunConfig.model_validate_json(config_json), stream, requested)
    except Exception as error:
        traceback.print_exc()
        finished = _failure(error)
    stream.flush(finished)
    connection.close()


def _measure(config: RunConfig, stream: Stream, requested: float) -> Finished:
    before = used_before()
    require(config)
    device = torch.device("cpu" if config.measurement.device == "cpu" else "cuda:0")
    with reader(device, before) as (read, described, warning):
        origin = time.perf_counter()
        first = {"device": described, "versions": versions(), "memory_source": read.source}
        stream.post(Started(**first, clock=origin, requested=requested))
        if warning:
            stream.post(Warned(message=warning))

        limit, total = config.measurement.memory_limit_mib, described.total_bytes

        def prove(proven: Proven, model: torch.nn.Module) -> None:
            if limit and total:  # by now kernels and cuBLAS have added to the context
                cap_allocator(limit * MIB, total, read()[0])
            for message in check(config, proven.effective, model):
                stream.post(Warned(message=message))

        measurement = config.measurement
        callback = MemoryCallback(
            stream.post,
            origin,
            measurement=measurement,
            on_proven=prove,
            taken=lambda: read()[0] or 0,
        )
        try:
            if limit and total:
                cap_allocator(limit * MIB, total, read()[0])
            with MemoryMonitor(read, measurement.period_ms / 1e3, stream.flush, origin):
                metrics = _train(config, device, callback)
            if limit:  # the allocator gives nothing back, so this is the peak
                check_taken(read()[0] or 0, limit)
            finished = Finished(
                outcome=Outcome.COMPLETED,
                metrics=metrics,
                end_device_bytes=read()[1],
                flops_per_sample=_flops(config, stream),
                peak_flops=peak_flops(described.name, config.training.precision),
            )
        except Exception as error:
            traceback.print_exc()
            finished = _failure(error)
        for message in read.late_comers():
            stream.post(Warned(message=message))
        last = {"memory_source": read.source, **_allocator_peaks(callback)}
        return finished.model_copy(update=last)


def _train(config: RunConfig, device: torch.device, callback: MemoryCallback) -> dict[str, float]:
    """Build and run the training; return the Trainer's own summary."""
    with tempfile.TemporaryDirectory() as output_dir:
        transformers.set_seed(config.workload.seed)
        trainer = build_trainer(config, device, callback, output_dir)
        metrics = trainer.train().metrics
        _prove_allocator(config.training.alloc_conf, device)
    return metrics


def _flops(config: RunConfig, stream: Stream) -> float | None:
    """Count operations. Whatever fails in that must not cost the measurement, which is over."""
    try:
        return flops_per_sample(config.workload)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        message = f"no tflops and no mfu: counting failed: {type(error).__name__}: {reason}"
        stream.post(Warned(message=message))
        return None


def _allocator_peaks(callback: MemoryCallback) -> dict[str, int]:
    peaks = callback.peaks
    if peaks is None:
        return {}
    with suppress(RuntimeError):  # after some errors CUDA answers no more; earlier steps' remain
        peaks.lap()
    return {"peak_allocated_bytes": peaks.allocated, "peak_reserved_bytes": peaks.reserved}


def _prove_allocator(alloc_conf: str | None, device: torch.device) -> None:
    if device.type != "cuda" or "expandable_segments:True" not in (alloc_conf or ""):
        return
    if not any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()):
        raise NotInEffectError(f"alloc_conf={alloc_conf!r}: no segment of the allocator expands")


def _failure(error: Exception) -> Finished:
    text = f"{error}".strip() or type(error).__name__
    words = any(word in text for word in _OUT_OF_MEMORY_WORDS)
    if words or isinstance(error, torch.OutOfMemoryError | MemoryError):
        return Finished(outcome=Outcome.OUT_OF_MEMORY, message=text.splitlines()[0])
    if isinstance(error, UnsupportedError):
        return Finished(outcome=Outcome.UNSUPPORTED, message=text)
    if isinstance(error, NotInEffectError | ConfigError):
        return Finished(outcome=Outcome.FAILED, message=text)
    return Finished(outcome=Outcome.FAILED, message=f"{type(error).__name__}: {text}")
