"""What to try next. Pure: what is known goes in, a configuration comes out, or none: all is known.

`frugal` measures what is most likely to be the answer, until nothing else can be; `grid` and
`random` measure everything, in order or not, and are there to compare with.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pipeline.search.judge import EQUAL_MEMORY, Verdict
from pipeline.search.model import MEMORY, TIME, Guess, Model
from pipeline.search.monotone import Inferred, Known, inferences
from pipeline.search.space import Candidate

_CHANCE = 0.02
"""A configuration less likely than this to be better than the best is not measured."""
_LIMIT_MARGIN = 1.15
"""So far above the memory limit a prediction has to lie to be believed without a trial."""
Predict = Callable[[Candidate], float | None]
"""The peak memory in MiB that a configuration is predicted to have; None where there is no say."""


class Sampler(Protocol):
    """Chooses among the candidates of a space."""

    def choose(self, known: Known) -> Candidate | None:
        """Return what to measure next; None if nothing needs to be."""

    def inferred(self, known: Known) -> Mapping[Candidate, Inferred]:
        """Return what is known of configurations that were not measured."""


class InOrder:
    """Measures everything."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._candidates = candidates

    def choose(self, known: Known) -> Candidate | None:
        """See Sampler."""
        left = (c for c in self._candidates if c not in known.results and c not in known.taken)
        return next(left, None)

    def inferred(self, known: Known) -> Mapping[Candidate, Inferred]:
        """See Sampler."""
        return {}


def shuffled(candidates: Sequence[Candidate], seed: int) -> InOrder:
    """Return a sampler that measures everything in random order."""
    return InOrder(random.Random(seed).sample(candidates, len(candidates)))


class Frugal:
    """Measures only what may be the answer.

    Where only the batch varies, nothing is left out but what follows from a trial by monotonicity:
    the answer is exact. Where settings vary too, a configuration is also left out that a model of
    the trials gives no chance (`model`): a combination of settings follows from no other one.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        predict: Predict | None = None,
        limit_mib: float | None = None,
    ) -> None:
        self._candidates = candidates
        self._has_options = len({candidate.options for candidate in candidates}) > 1
        predicted = {c: predict(c) for c in candidates} if predict else {}
        self._hints = {c: mib for c, mib in predicted.items() if mib}
        self._limit_mib = limit_mib

    def choose(self, known: Known) -> Candidate | None:
        """See Sampler."""
        certain = inferences(self._candidates, known) | self._beyond_limit(known)
        left = [c for c in self._candidates if c not in known.results and c not in certain]
        chances = self._chances(left, known)
        likely = [c for c in left if not self._has_options or chances[c][0] >= _CHANCE]
        free = [c for c in likely if c not in known.taken]
        return max(free, key=lambda c: chances[c][1], default=None)

    def inferred(self, known: Known) -> Mapping[Candidate, Inferred]:
        """See Sampler."""
        certain = inferences(self._candidates, known) | self._beyond_limit(known)
        if not self._has_options:
            return certain
        left = [c for c in self._candidates if c not in known.results and c not in certain]
        models = self._models(known)
        chances = self._chances(left, known)
        return certain | {c: _unlikely(c, known, models) for c in left if chances[c][0] < _CHANCE}

    def _models(self, known: Known) -> tuple[Model, Model] | None:
        memory = {c: m.memory_mib for c, m in known.results.items() if m.speed and m.memory_mib}
        times = {c: 1 / m.speed for c, m in known.results.items() if m.speed}
        if not memory:
            return None
        return Model(MEMORY, memory, self._hints), Model(TIME, times)

    def _chances(
        self, left: Sequence[Candidate], known: Known
    ) -> dict[Candidate, tuple[float, float]]:
        """Return how likely each is to be better than the best, and how much it promises."""
        models = self._models(known)
        if models is None:  # nothing ever completed: the least demanding first
            return {c: (1.0, -self._hints.get(c, float(c.micro_batch))) for c in left}
        best = known.best_mib
        found = {}
        for candidate in left:
            memory, time = models[0].guess(candidate), models[1].guess(candidate)
            fast = time.chance_below(1 / known.floor) if known.floor else 1.0
            small = memory.chance_below(best * (1 - EQUAL_MEMORY)) if best else 1.0
            found[candidate] = (fast * small, fast * _gain(memory, best))
        return found

    def _beyond_limit(self, known: Known) -> dict[Candidate, Inferred]:
        if self._limit_mib is None:
            return {}
        first = min(known.numbers.values(), default=0)
        limit = self._limit_mib
        return {
            c: Inferred(
                Verdict.OUT_OF_MEMORY, first, f"{mib:,.0f} MiB predicted, the limit is {limit:,.0f}"
            )
            for c, mib in self._hints.items()
            if mib > limit * _LIMIT_MARGIN and c not in known.results
        }


def _gain(memory: Guess, best: float | None) -> float:
    """Return what a configuration may save; where nothing reaches the floor yet, little counts."""
    if best is None:
        return 1.0 / (1.0 + memory.value / 1e5)
    share = memory.chance_below(best)
    return share * max(1 - memory.value * (1 - memory.spread / 2) / best, 1e-3)


def _unlikely(candidate: Candidate, known: Known, models: tuple[Model, Model] | None) -> Inferred:
    """Return why a configuration was left out, and the trial that is most like it."""
    assert models is not None, "without a trial nothing is left out"
    nearest = min(known.results, key=lambda other: _distance(candidate, other))
    memory, time = models[0].guess(candidate), models[1].guess(candidate)
    slow = known.floor > 0 and time.chance_below(1 / known.floor) < 0.5
    figures = f"likely {memory.value:,.0f} MiB at {1 / time.value:.4g} samples/s"
    reason = f"{figures}, by the trials so far; most like it is {nearest.key}"
    found = Verdict.TOO_SLOW if slow or not known.best_mib else Verdict.TOO_LARGE
    return Inferred(found, known.numbers[nearest], reason)


def _distance(candidate: Candidate, other: Candidate) -> tuple[int, int]:
    differing = sum(a != b for a, b in zip(candidate.options, other.options, strict=False))
    return differing, abs(candidate.micro_batch - other.micro_batch)
