"""Gather the events of one training and sum them up. Pure: knows no process and no MLflow."""

import math
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

from pipeline.config import RunConfig
from pipeline.ledger import taken_apart
from pipeline.record import (
    MIB,
    Built,
    Composed,
    Event,
    Finished,
    Kept,
    Ledger,
    Logged,
    MemorySample,
    Outcome,
    Proven,
    RunRecord,
    Samples,
    Started,
    StepMark,
    Steps,
    Warned,
)
from pipeline.throughput import MIN_TIMED_STEPS, percentile_ms, rate, warmup_length

TRAINER_METRICS = ("train_runtime", "train_samples_per_second", "train_loss")


class Recorder:
    """Turns a stream of events into a RunRecord, at any moment of the training."""

    def __init__(self, warmup_steps: int, seq_len: int | None = None) -> None:
        self.samples: list[MemorySample] = []
        self.peak: MemorySample | None = None
        """The highest reading so far."""
        self.steps: list[StepMark] = []
        self.logged: list[Logged] = []
        self.warnings: list[str] = []
        self.started: Started | None = None
        self.built: Built | None = None
        self.proven: Proven | None = None
        self.composed: Composed | None = None
        self.files: dict[str, bytes] = {}
        self.finished: Finished | None = None
        self.began_at = time.time()
        self._warmup_steps = warmup_steps
        self._seq_len = seq_len

    def handle(self, event: Event) -> None:
        """Take in one event."""
        match event:
            case Samples(rows=rows):
                self.samples.extend(rows)
                self.peak = highest(self.peak, rows)
            case Steps(rows=rows):
                self.steps.extend(rows)
            case Logged():
                self.logged.append(event)
            case Warned(message=message):
                self.warnings.append(message)
            case Kept(name=name, content=content):
                self.files[name] = content
            case _:  # of the others there is one each, kept under its own name
                setattr(self, type(event).__name__.lower(), event)

    @property
    def warmup(self) -> int:
        """How many of the first steps do not count as speed."""
        return warmup_length(self.step_seconds(), self._warmup_steps)

    def step_seconds(self) -> list[float]:
        """Return for each step the time from the end of the one before (or its own begin)."""
        previous = [self.steps[0].begun, *(mark.ended for mark in self.steps)] if self.steps else []
        return [mark.ended - before for mark, before in zip(self.steps, previous, strict=False)]

    def record(
        self, config: RunConfig, outcome: Outcome, message: str, interrupted: bool = False
    ) -> RunRecord:
        """Return what is known by now."""
        started, finished = self.started, self.finished
        source = finished.memory_source if finished else None
        return RunRecord(
            config=config,
            outcome=outcome,
            message=message,
            interrupted=interrupted,
            started_at=self.began_at,
            ended_at=time.time(),
            device=started.device if started else None,
            memory_source=source or (started.memory_source if started else None),
            versions=started.versions if started else {},
            effective=self.proven.effective if self.proven else None,
            ledger=self.ledger(),
            warnings=self._all_warnings(),
            diverged=self.diverged,
            steps=len(self.steps),
            total_steps=self.built.total_steps if self.built else None,
            metrics=self.metrics(),
        )

    def metrics(self) -> dict[str, float]:
        """Return the summary figures; what was not measured, or is not finite, is absent."""
        values: dict[str, float | None] = {
            **self._memory_metrics(),
            **self._ledger_metrics(),
            **self._speed_metrics(),
            **self._trainer_metrics(),
        }
        return {k: float(v) for k, v in values.items() if v is not None and math.isfinite(v)}

    def _memory_metrics(self) -> dict[str, float | None]:
        allocated = [mark.peak_allocated for mark in self.steps if mark.peak_allocated]
        done = self.finished
        peak_allocated = done.peak_allocated_bytes if done else None
        if peak_allocated is None:  # a training that failed tells by its steps
            peak_allocated = max(allocated, default=None)
        effective = self.proven.effective if self.proven else None
        return {
            "peak_memory_mib": _mib(self.peak.process if self.peak else None),
            "device_memory_end_mib": _mib(done.end_device_bytes if done else None),
            "peak_allocated_mib": _mib(peak_allocated),
            "peak_reserved_mib": _mib(done.peak_reserved_bytes if done else None),
            "optimizer_state_mib": _mib(effective.optimizer_bytes if effective else None),
            "optimizer_8bit_share": effective.eight_bit_share if effective else None,
        }

    def ledger(self) -> Ledger | None:
        """Return the peak taken apart; None where its parts are not known."""
        done, peak = self.finished, self.peak.process if self.peak else None
        return taken_apart(peak, self.composed, done) if peak and self.composed and done else None

    def _ledger_metrics(self) -> dict[str, float | None]:
        ledger = self.ledger()
        parts = ledger.model_dump(exclude={"phase"}) if ledger else {}
        return {f"ledger/{part}_mib": _mib(count) for part, count in parts.items()}

    def _speed_metrics(self) -> dict[str, float | None]:
        if not self.steps:
            return {}
        skip, seconds = self.warmup, self.step_seconds()
        marks = self.steps[skip:]
        values: dict[str, float | None] = {
            "warmup_steps": skip,
            "warmup_seconds": sum(seconds[:skip]),
            "first_step_seconds": seconds[0],
            "startup_seconds": self._startup_seconds(),
        }
        if len(marks) < MIN_TIMED_STEPS:
            return values
        own = [mark.ended - mark.begun for mark in marks]
        waits = [whole - step for whole, step in zip(seconds[skip:], own, strict=True)]
        values["step_time_p50_ms"] = percentile_ms(own, 50)
        values["step_time_p95_ms"] = percentile_ms(own, 95)
        values["data_wait_p50_ms"] = percentile_ms(waits, 50)
        return values | self._rates(marks, seconds[skip:])

    def _startup_seconds(self) -> float | None:
        """Return the time from the request to the end of the first step."""
        if self.started is None or self.started.requested is None:
            return None
        return self.started.clock + self.steps[0].ended - self.started.requested

    def _rates(self, marks: list[StepMark], seconds: list[float]) -> dict[str, float | None]:
        counts = [mark.samples for mark in marks if mark.samples is not None]
        speed = rate(counts, seconds) if len(counts) == len(marks) else None
        if speed is None:
            return {}
        done = self.finished
        flops = done.flops_per_sample * speed.mean if done and done.flops_per_sample else None
        return {
            "samples_per_second": speed.mean,
            "samples_per_second_low": speed.low,
            "samples_per_second_high": speed.high,
            "tokens_per_second": speed.mean * self._seq_len if self._seq_len else None,
            "effective_batch": float(median(counts)),
            "tflops": flops / 1e12 if flops else None,
            "mfu": flops / done.peak_flops if flops and done and done.peak_flops else None,
        }

    def _trainer_metrics(self) -> dict[str, float | None]:
        own: Mapping[str, Any] = self.finished.metrics if self.finished else {}
        return {name: own.get(name) for name in TRAINER_METRICS}

    def _all_warnings(self) -> tuple[str, ...]:
        """Return the worker's warnings and those that only the whole training gives."""
        warnings = list(self.warnings)
        counts = [mark.samples for mark in self.steps if mark.samples is not None]
        if self.built and counts and median(counts) < self.built.asked_batch:
            warnings.append(
                f"effective batch: {self.built.asked_batch} samples a step were asked for, "
                f"{median(counts):g} went through (the data ends before the batch is full)"
            )
        if self.diverged:
            warnings.append(
                "diverged: the loss is not finite, so this run is no candidate for best"
            )
        return tuple(warnings)

    @property
    def diverged(self) -> bool:
        """Whether a loss was not finite."""
        losses = [event.values["loss"] for event in self.logged if "loss" in event.values]
        # A training of fewer steps than the Trainer logs after has its loss here alone.
        losses += [self.finished.metrics.get("train_loss", 0.0)] if self.finished else []
        return not all(math.isfinite(loss) for loss in losses)


def highest(best: MemorySample | None, rows: tuple[MemorySample, ...]) -> MemorySample | None:
    """Return the sample that took most, of these and the best so far."""
    for row in rows:
        if row.process is not None and (best is None or row.process > (best.process or 0)):
            best = row
    return best


def _mib(count: int | None) -> float | None:
    return None if count is None else count / MIB
