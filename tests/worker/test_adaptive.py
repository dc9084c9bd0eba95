"""When an adaptive measurement has seen enough."""

import random

from pipeline.config import Measurement
from pipeline.record import MIB, StepMark
from pipeline.worker.adaptive import StopWhenKnown


def steps(stopping: StopWhenKnown, seconds: float, noise: float = 0.0, most: int = 500) -> int:
    """Return after how many steps of 8 samples it stops."""
    draw, clock = random.Random(1), 0.0
    for number in range(1, most + 1):
        begun, clock = clock, clock + seconds * (1 + draw.uniform(-noise, noise))
        if stopping.enough([StepMark(number, begun, clock, 8)]):
            return number
    return most


def adaptive(**values: float) -> Measurement:
    return Measurement.model_validate({"measure": "adaptive", **values})


def test_speed_clear_of_the_floor_is_enough() -> None:
    for floor in (40.0, 160.0):
        assert steps(StopWhenKnown(adaptive(floor=floor)), 0.1, noise=0.2) == 10


def test_speed_near_the_floor_is_measured_longer() -> None:
    assert steps(StopWhenKnown(adaptive(floor=80.0)), 0.1, noise=0.2) > 40


def test_memory_above_the_ceiling_needs_no_speed() -> None:
    measurement = adaptive(floor=80.0, ceiling_mib=1000)
    assert steps(StopWhenKnown(measurement, lambda: 1001 * MIB), 0.1, noise=0.2) == 8
    assert steps(StopWhenKnown(measurement, lambda: 999 * MIB), 0.1, noise=0.2) > 40


def test_steps_of_a_moment_are_not_enough_to_be_clear() -> None:
    assert steps(StopWhenKnown(adaptive(floor=40.0)), 0.01, noise=0.2) > 50
