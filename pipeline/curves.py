"""From events to the curves of a tracking server: few enough points, none of the peaks lost."""

import math
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from pipeline.record import MIB, Built, Event, Logged, MemorySample, Samples, StepMark, Steps

POINTS_PER_CURVE = 500
_SEND_EVERY_SECONDS = 3.0
_UNKNOWN_INTERVAL_SECONDS = 0.1
_SHORTEST_INTERVAL_SECONDS = 0.02
_RESERVE_POINTS = 25
_MEMORY = ("process", "device", "allocated", "reserved")


class Point(NamedTuple):
    """A value of a metric at a step."""

    key: str
    value: float
    timestamp_ms: int
    step: int


class MemoryCurve:
    """Keeps the highest reading of each interval, at the time when it was read.

    The interval spreads the points that are left over the time that is expected to be left, which
    is only known better as steps go by. A reserve lets a training go on for longer than expected.
    """

    def __init__(self, name: str) -> None:
        self.key = f"memory/{name}_mib"
        self._index = MemorySample._fields.index(name)
        self._best: MemorySample | None = None
        self._interval_ends = 0.0
        self._points = 0

    def add(self, sample: MemorySample, expected_end: float | None) -> MemorySample | None:
        """Take in a reading; return the highest of an interval that is over."""
        if sample[self._index] is None:
            return None
        done = None
        if sample.seconds >= self._interval_ends:
            done, self._best = self._best, None
            self._points += 1
            self._interval_ends = sample.seconds + self._interval(sample.seconds, expected_end)
        if self._best is None or self.value(sample) > self.value(self._best):
            self._best = sample
        return done

    def _interval(self, now: float, expected_end: float | None) -> float:
        left = max(POINTS_PER_CURVE - self._points, _RESERVE_POINTS)
        if expected_end is None:
            return max(_UNKNOWN_INTERVAL_SECONDS, now / left)
        # A training that outlives what was expected has at least a tenth of its age to go.
        ahead = max(expected_end - now, now / 10)
        return max(ahead / left, _SHORTEST_INTERVAL_SECONDS)

    def rest(self) -> MemorySample | None:
        """Return the highest of the interval that is not over."""
        best, self._best = self._best, None
        return best

    def value(self, sample: MemorySample) -> float:
        """Return this curve's figure of a sample, MiB."""
        return (sample[self._index] or 0) / MIB


class Curves:
    """Turns the events of one training into points."""

    def __init__(self, began_at: float) -> None:
        self._began_at = began_at
        self._memory = [MemoryCurve(name) for name in _MEMORY]
        self._expected_end: float | None = None
        self._total_steps = 0
        self._first_step: StepMark | None = None
        self._previous_end: float | None = None
        self._held: list[StepMark] = []

    def points(self, event: Event) -> list[Point]:
        """Return the points that this event completes."""
        match event:
            case Built(total_steps=total):
                self._total_steps = total
            case Samples(rows=rows):
                return self._memory_points(rows)
            case Steps(rows=rows):
                return [point for mark in rows for point in self._step_points(mark)]
            case Logged(step=step, values=values) if math.isfinite(values.get("loss", math.nan)):
                return [self._point("step/loss", values["loss"], None, step)]
        return []

    def rest(self) -> list[Point]:
        """Return what was held back for intervals that never ended."""
        found = [(curve, curve.rest()) for curve in self._memory]
        memory = [self._sample_point(curve, sample) for curve, sample in found if sample]
        return memory + self._held_points()

    def _memory_points(self, rows: tuple[MemorySample, ...]) -> list[Point]:
        found = [
            (curve, curve.add(row, self._expected_end)) for row in rows for curve in self._memory
        ]
        return [self._sample_point(curve, sample) for curve, sample in found if sample]

    def _sample_point(self, curve: MemoryCurve, sample: MemorySample) -> Point:
        milliseconds = round(sample.seconds * 1e3)
        return self._point(curve.key, curve.value(sample), sample.seconds, milliseconds)

    def _step_points(self, mark: StepMark) -> list[Point]:
        self._held.append(mark)
        self._first_step = first = self._first_step or mark
        if self._total_steps and mark.step > first.step:
            # The pace since the first step, which may have held minutes of compilation.
            pace = (mark.ended - first.ended) / (mark.step - first.step)
            self._expected_end = mark.ended + pace * max(self._total_steps - mark.step, 0)
        stride = math.ceil(self._total_steps / POINTS_PER_CURVE) or 1
        return self._held_points() if len(self._held) >= stride else []

    def _held_points(self) -> list[Point]:
        """Return the points of the steps held back: their mean pace, their highest peak."""
        held, self._held = self._held, []
        if not held:
            return []
        last = held[-1]
        begun = held[0].begun if self._previous_end is None else self._previous_end
        self._previous_end = last.ended
        seconds = last.ended - begun
        values = {"step/time_ms": seconds / len(held) * 1e3}
        counts = [mark.samples for mark in held if mark.samples is not None]
        if len(counts) == len(held) and seconds > 0:
            values["step/samples_per_second"] = sum(counts) / seconds
        peaks = [mark.peak_allocated for mark in held if mark.peak_allocated is not None]
        if peaks:
            values["step/peak_allocated_mib"] = max(peaks) / MIB
        return [self._point(key, value, last.ended, last.step) for key, value in values.items()]

    def _point(self, key: str, value: float, seconds: float | None, step: int) -> Point:
        at = time.time() if seconds is None else self._began_at + seconds
        return Point(key, value, round(at * 1e3), step)


class CurveSender:
    """Sends points in batches on a thread of its own, so that nobody waits for a server.

    `send` may raise: the points are kept, sent again with the next batch, and the last error is
    there for the owner to look at after `close`.
    """

    def __init__(self, send: Callable[[list[Point]], None], began_at: float) -> None:
        self._send = send
        self._curves = Curves(began_at)
        self._waiting: list[Point] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="curve-sender", daemon=True)
        self._thread.start()

    def handle(self, event: Event) -> None:
        """Take in one event."""
        with self._lock:
            self._waiting += self._curves.points(event)

    def close(self) -> None:
        """Send the rest and end the thread."""
        with self._lock:
            self._waiting += self._curves.rest()
        self._closed.set()
        self._thread.join()

    @property
    def unsent(self) -> int:
        """How many points could not be sent."""
        return len(self._waiting)

    def _run(self) -> None:
        while not self._closed.wait(_SEND_EVERY_SECONDS):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        with self._lock:
            batch, self._waiting = self._waiting, []
        if not batch:
            return
        try:
            self._send(batch)
            self.error = None
        except Exception as error:
            self.error = error
            with self._lock:
                self._waiting = batch + self._waiting
