"""From step times to a rate with its uncertainty. Plain data in, numbers out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

MIN_TIMED_STEPS = 4
_MAX_BATCHES = 20
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Rate:
    """Samples per second with a 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def relative_half_width(self) -> float:
        """Half of the interval as a share of the mean."""
        return (self.high - self.low) / 2 / self.mean


def warmup_length(seconds: Sequence[float], at_least: int) -> int:
    """Return how many leading steps to leave out of the rate.

    The first `at_least`, and then as many as minimise the standard error of what remains (the
    marginal standard error rule: White, 1997, "An effective truncation heuristic for bias
    reduction in simulation output"), which finds compilation and late first allocations. At most
    half of the steps are given up beyond `at_least`, so noise cannot eat the measurement.
    """
    times = np.asarray(seconds[at_least:], dtype=float)
    if len(times) < 2 * MIN_TIMED_STEPS:
        return min(at_least, len(seconds))
    candidates = range(len(times) // 2 + 1)
    errors = [float(times[skip:].var()) / (len(times) - skip) for skip in candidates]
    good_enough = min(errors) * 1.1
    return at_least + next(skip for skip in candidates if errors[skip] <= good_enough)


def _batch_means(samples: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return seconds per sample of consecutive groups of steps, which tames their correlation."""
    groups = min(len(seconds), _MAX_BATCHES)
    edges = np.linspace(0, len(seconds), groups + 1).astype(int)[:-1]
    return np.add.reduceat(seconds, edges) / np.add.reduceat(samples, edges)


def rate(samples: Sequence[int], seconds: Sequence[float]) -> Rate | None:
    """Return samples per second of these steps, or None where there are too few to say.

    `samples[i]` went through the model in `seconds[i]`. The interval is Student's t over the mean
    times of up to 20 groups of consecutive steps.
    """
    if len(seconds) < MIN_TIMED_STEPS or sum(seconds) <= 0 or sum(samples) <= 0:
        return None
    counts, times = np.asarray(samples, dtype=float), np.asarray(seconds, dtype=float)
    pace = float(times.sum() / counts.sum())
    means = _batch_means(counts, times)
    quantile = float(stdtrit(len(means) - 1, (1 + _CONFIDENCE) / 2))
    half = quantile * float(means.std(ddof=1)) / math.sqrt(len(means))
    # A pace cannot fall to zero, however few and scattered the steps: the rate stays finite.
    return Rate(1 / pace, 1 / (pace + half), 1 / max(pace - half, pace / 10))


def percentile_ms(seconds: Sequence[float], percent: float) -> float:
    """Return a percentile of step times in milliseconds."""
    return float(np.percentile(np.asarray(seconds, dtype=float), percent) * 1e3)
