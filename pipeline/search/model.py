"""From a few trials to all configurations: what memory and time are made of.

Memory is what stays whatever the batch, plus gradients that accumulation keeps alive, plus the
activations of each sample. The time of a sample is its computation, its share of the launches of
one pass, and its share of the optimizer step. Each part is a product of the effects of the
settings. Both are fitted to the trials by least squares in logarithms, with a prior on each effect
(`expected`), so that one trial is enough to begin with and each further one narrows the guess.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from pipeline.search.expected import expected
from pipeline.search.space import Candidate

_EFFECT_SPREAD = 0.3
"""How far an effect may lie from what is expected, as a standard deviation of its logarithm."""
_SIZE_SPREAD = 1.0
"""The same for the parts of the start, of which only the sum is known."""
Floats = NDArray[np.float64]


class Kind(NamedTuple):
    """One of the two figures: its parts, and how well the sum of them can be trusted."""

    parts: tuple[str, ...]
    """Which factors of `Expected` belong to each part."""
    shares: tuple[float, ...]
    """How the start's figure is divided among them, before anything else is known."""
    noise: float
    """Least standard deviation of a trial from the sum, as a share."""


MEMORY = Kind(("fixed_memory", "fixed_memory", "sample_memory"), (0.6, 0.1, 0.3), 0.015)
TIME = Kind(("sample_time", "pass_time", "step_time"), (0.35, 0.5, 0.15), 0.08)


def _weights(kind: Kind, candidate: Candidate) -> tuple[float, ...]:
    """Return how often each part counts."""
    size = candidate.micro_batch
    if kind is MEMORY:
        return 1.0, float(candidate.accumulation > 1), float(size)
    return 1.0, 1.0 / size, 1.0 / candidate.effective_batch


class Guess(NamedTuple):
    """A figure that was not measured, and the standard deviation of its logarithm."""

    value: float
    spread: float

    def chance_below(self, limit: float) -> float:
        """Return how likely the figure is to be lower than this."""
        if limit <= 0:
            return 0.0
        return 0.5 * math.erfc(-(math.log(limit / self.value) / self.spread) / math.sqrt(2))


class Model:
    """Guesses one figure of every configuration from trials and from hints."""

    def __init__(
        self,
        kind: Kind,
        trials: Mapping[Candidate, float],
        hints: Mapping[Candidate, float] | None = None,
        hint_noise: float = 0.06,
    ) -> None:
        self._kind = kind
        self._reference = next(iter(trials))
        rows = [*trials, *(hints or {})]
        values = [*trials.values(), *(hints or {}).values()]
        self._effects = sorted({o for row in rows for o in row.options}, key=repr)
        self._place = {option: index for index, option in enumerate(self._effects)}
        logs = np.log(np.asarray(values, dtype=float))
        is_hint = (np.arange(len(rows)) >= len(trials)).astype(float)
        self._fit(rows, logs, np.where(is_hint > 0, hint_noise, kind.noise), is_hint)

    def _fit(self, rows: Sequence[Candidate], logs: Floats, noise: Floats, is_hint: Floats) -> None:
        parts = len(self._kind.parts)
        weights = _weights(self._kind, self._reference)
        total = math.exp(float(logs[0]))
        sizes = [
            math.log(total * share / max(weight, 0.5))
            for share, weight in zip(self._kind.shares, weights, strict=True)
        ]
        count = parts * (1 + len(self._effects))
        prior = np.zeros(count + 1)  # the last: hints may all be off by one factor
        prior[:parts] = sizes
        spread = np.full(count + 1, _EFFECT_SPREAD)
        spread[:parts], spread[-1] = _SIZE_SPREAD, 0.1

        def misfits(values: Floats) -> Floats:
            found = np.asarray([self._log(values, row)[0] for row in rows])
            off = (found - is_hint * values[-1] - logs) / noise
            return np.concatenate([off, (values - prior) / spread])

        def slopes(values: Floats) -> Floats:
            own = np.asarray([self._log(values, row)[1] for row in rows])
            own[:, -1] = -1.0 * is_hint
            return np.concatenate([own / noise[:, None], np.diag(1 / spread)])

        solved = least_squares(misfits, prior, slopes, method="lm")
        self._values = solved.x
        # Where the trials themselves lie off the sum, the sum is trusted as little elsewhere.
        off = float(np.sqrt(np.mean(solved.fun[: len(rows)] ** 2)))
        self._noise = self._kind.noise * max(1.0, off)
        self._covariance = np.linalg.inv(solved.jac.T @ solved.jac) * max(1.0, off) ** 2

    def _log(self, values: Floats, candidate: Candidate) -> tuple[float, Floats]:
        """Return the logarithm of the sum of the parts, and its slope in the values."""
        parts = len(self._kind.parts)
        own = [self._place[option] for option in candidate.options if option in self._place]
        begins = [0, *(parts * (1 + place) for place in own)]
        effects = np.array(self._expected(candidate), dtype=float)
        for begin in begins:
            effects += values[begin : begin + parts]
        sizes = np.asarray(_weights(self._kind, candidate)) * np.exp(effects)
        slope = np.zeros(len(values))
        for begin in begins:
            slope[begin : begin + parts] = sizes / sizes.sum()
        return math.log(sizes.sum()), slope

    def _expected(self, candidate: Candidate) -> list[float]:
        """Return what is expected of the settings that differ from the reference's."""
        before = dict(self._reference.options)
        pairs = [(expected(o), expected((o[0], before.get(o[0])))) for o in candidate.options]
        return [
            sum(math.log(getattr(new, part) / getattr(old, part)) for new, old in pairs)
            for part in self._kind.parts
        ]

    def guess(self, candidate: Candidate) -> Guess:
        """Return what this configuration is likely to show."""
        center, slope = self._log(self._values, candidate)
        unknown = sum(option not in self._place for option in candidate.options)
        variance = float(slope @ self._covariance @ slope)
        variance += self._noise**2 + unknown * _EFFECT_SPREAD**2
        return Guess(math.exp(center), math.sqrt(variance))
