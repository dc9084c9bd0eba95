"""When a training has shown enough: its throughput is known, or it does not matter any more."""

import math
from collections.abc import Callable
from itertools import pairwise

from pipeline.config import Measurement
from pipeline.record import MIB, StepMark
from pipeline.throughput import MIN_TIMED_STEPS, Rate, rate, warmup_length

_RELATIVE_HALF_WIDTH = 0.02
_MIN_STEPS = 10
_MIN_SECONDS = 1.0
_MIN_SECONDS_TO_CLEAR = 0.5
"""Neighbouring steps are alike: an interval of fewer would be too sure of itself."""


class StopWhenKnown:
    """Says when to end a training that is measured adaptively.

    Once the throughput's 95 % interval is within 2 % of it, or clear of the floor; and after the
    least number of steps that can be timed where it takes more than the ceiling.
    """

    def __init__(self, measurement: Measurement, taken: Callable[[], int] | None = None) -> None:
        self._warmup_steps = measurement.warmup_steps
        self._floor = measurement.floor
        ceiling = measurement.ceiling_mib
        self._ceiling = ceiling * MIB if ceiling and taken else None
        self._taken = taken or (lambda: 0)
        self._marks: list[StepMark] = []
        first = MIN_TIMED_STEPS + 1 if self._floor or self._ceiling else _MIN_STEPS
        self._look_at = first + self._warmup_steps

    def enough(self, marks: list[StepMark]) -> bool:
        """Take in new steps and return whether nothing more needs to be known."""
        self._marks += marks
        if len(self._marks) < self._look_at:
            return False
        # Looking every time would cost more than it saves, and stop at the first lucky streak.
        self._look_at = math.ceil(self._look_at * 1.25)
        if self._ceiling is not None and self._taken() > self._ceiling:
            return True
        ends = [mark.ended for mark in self._marks]
        seconds = [later - sooner for sooner, later in pairwise(ends)]
        skip = warmup_length(seconds, self._warmup_steps)
        counts = [mark.samples or 0 for mark in self._marks[1:]]
        return self._is_known(rate(counts[skip:], seconds[skip:]), seconds[skip:])

    def _is_known(self, speed: Rate | None, seconds: list[float]) -> bool:
        if speed is None:
            return False
        narrow = speed.relative_half_width <= _RELATIVE_HALF_WIDTH
        if narrow and len(seconds) >= _MIN_STEPS - 1 and sum(seconds) >= _MIN_SECONDS:
            return True
        if self._floor is None or sum(seconds) < _MIN_SECONDS_TO_CLEAR:
            return False
        return speed.low > self._floor or speed.high < self._floor
