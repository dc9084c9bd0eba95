"""What a trial showed, and what that means under a floor. Pure: figures in, verdicts out."""

import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from statistics import median
from typing import NamedTuple

from pipeline.config import Frozen
from pipeline.errors import ConfigError
from pipeline.record import Outcome, RunRecord

EQUAL_MEMORY = 0.01
"""Peaks that differ by less count as equal: the faster configuration wins."""
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) ([KMGT]?)i?B")
_MIB_PER = {"": 2**-20, "K": 2**-10, "M": 1.0, "G": 2.0**10, "T": 2.0**20}


class Verdict(StrEnum):
    """What a configuration is, measured or inferred."""

    FEASIBLE = "feasible"
    TOO_SLOW = "too slow"
    TOO_LARGE = "more memory than the best"
    OUT_OF_MEMORY = "out of memory"
    TIMEOUT = "timeout"
    UNSUPPORTED = "unsupported"
    CRASHED = "crashed"
    DIVERGED = "diverged"
    NOT_TIMED = "too few steps to time"


FAILURES = {
    Verdict.OUT_OF_MEMORY,
    Verdict.TIMEOUT,
    Verdict.UNSUPPORTED,
    Verdict.CRASHED,
    Verdict.DIVERGED,
    Verdict.NOT_TIMED,
}


class Measured(Frozen):
    """The figures of one training that a search goes by."""

    outcome: Outcome
    memory_mib: float | None = None
    speed: float | None = None
    speed_low: float | None = None
    speed_high: float | None = None
    steps: int = 0
    seconds: float = 0.0
    """From the request to the end of the training."""
    diverged: bool = False
    message: str = ""
    asked_mib: float | None = None
    """What the allocation that failed asked for."""
    run_id: str = ""


def measured(record: RunRecord, run_id: str = "") -> Measured:
    """Return what a search wants to know of a training."""
    figures = record.metrics
    asked = _ASKED.search(record.message)
    return Measured(
        outcome=record.outcome,
        memory_mib=figures.get("peak_memory_mib"),
        speed=figures.get("samples_per_second"),
        speed_low=figures.get("samples_per_second_low"),
        speed_high=figures.get("samples_per_second_high"),
        steps=record.steps,
        seconds=record.ended_at - record.started_at,
        diverged=record.diverged,
        message=record.message,
        asked_mib=float(asked[1]) * _MIB_PER[asked[2]] if asked else None,
        run_id=run_id,
    )


def pooled(repeats: Sequence[Measured]) -> Measured:
    """Return repeats of one configuration as one: its interval covers them all."""
    failed = [one for one in repeats if one.outcome is not Outcome.COMPLETED or not one.speed]
    if failed or len(repeats) == 1:
        return (failed or repeats)[-1]
    return repeats[-1].model_copy(
        update={
            "memory_mib": max(one.memory_mib or 0.0 for one in repeats) or None,
            "speed": median(one.speed or 0.0 for one in repeats),
            "speed_low": min(one.speed_low or 0.0 for one in repeats),
            "speed_high": max(one.speed_high or 0.0 for one in repeats),
            "steps": sum(one.steps for one in repeats),
            "seconds": sum(one.seconds for one in repeats),
        }
    )


class Floor(NamedTuple):
    """The least throughput: samples per second, or a share of the start's."""

    value: float
    is_share: bool

    def samples_per_second(self, start: Measured | None) -> float | None:
        """Return the floor in samples per second; None while the start is not known."""
        if not self.is_share:
            return self.value
        return self.value * start.speed if start and start.speed else None


def read_floor(text: str) -> Floor:
    """Return the floor that `30` or `90%` stands for. Raises ConfigError."""
    number, percent, rest = text.strip().partition("%")
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf") or rest.strip():
        wanted = "samples per second (30) or a share of the starting preset (90%)"
        raise ConfigError(f"min_throughput={text!r}: expected {wanted}")
    return Floor(value / 100 if percent else value, bool(percent))


def verdict(result: Measured, floor: float) -> Verdict:
    """Return what a measured configuration is: too slow if its whole interval is."""
    failure = {
        Outcome.OUT_OF_MEMORY: Verdict.OUT_OF_MEMORY,
        Outcome.TIMEOUT: Verdict.TIMEOUT,
        Outcome.UNSUPPORTED: Verdict.UNSUPPORTED,
        Outcome.FAILED: Verdict.CRASHED,
    }.get(result.outcome)
    if failure:
        return failure
    if result.diverged:
        return Verdict.DIVERGED
    if result.speed_high is None or result.memory_mib is None:
        return Verdict.NOT_TIMED
    return Verdict.FEASIBLE if result.speed_high >= floor else Verdict.TOO_SLOW


def shortfall(result: Measured, floor: float) -> float:
    """Return the violated constraint's value: the share of the floor that is missing, else <= 0."""
    if verdict(result, floor) in FAILURES or result.speed_high is None:
        return 1.0
    return 1.0 - result.speed_high / floor if floor else -1.0


def ranked(results: Iterable[tuple[str, Measured]]) -> list[str]:
    """Return the names of feasible results, the best first: least memory, then the faster."""
    left = sorted(results, key=lambda pair: pair[1].memory_mib or 0.0)
    order = []
    while left:
        limit = (left[0][1].memory_mib or 0.0) * (1 + EQUAL_MEMORY)
        equal = [pair for pair in left if (pair[1].memory_mib or 0.0) <= limit]
        best = max(equal, key=lambda pair: pair[1].speed or 0.0)
        order.append(best[0])
        left.remove(best)
    return order
