"""Which outcomes follow from others: memory and speed both rise with the micro-batch.

Pure: what is known goes in, what follows comes out. Nothing follows from what itself was inferred.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from pipeline.record import Outcome
from pipeline.search.judge import EQUAL_MEMORY, Measured, Verdict, ranked, verdict
from pipeline.search.space import Candidate

# NVML's figure falls now and then where the batch grows: the allocator reserves in blocks
# (1x1 took 2834 MiB, 2x1 2828).
_MEMORY_MARGIN = 0.02
# Runs of one configuration differ by more than the interval of either, where the host is the brake.
_SPEED_MARGIN = 0.15


class Known(NamedTuple):
    """What a study knows at this moment."""

    floor: float
    """Samples per second."""
    results: Mapping[Candidate, Measured]
    numbers: Mapping[Candidate, int]
    """Of the trial that each result is from."""
    taken: frozenset[Candidate] = frozenset()
    """Being measured, here or by another process."""
    confirmed: frozenset[Candidate] = frozenset()
    """Measured over a full epoch."""

    @property
    def feasible(self) -> dict[Candidate, Measured]:
        """The configurations that reach the floor."""
        found = self.results.items()
        return {c: m for c, m in found if verdict(m, self.floor) is Verdict.FEASIBLE}

    @property
    def best(self) -> Candidate | None:
        """The one with the least memory that reaches the floor.

        Of equal ones the faster; one that is confirmed stays ahead of those equal to it.
        """
        found = {c: m.memory_mib or 0.0 for c, m in self.feasible.items()}
        limit = min(found.values(), default=0.0) * (1 + EQUAL_MEMORY)
        sure = [c for c, memory in found.items() if memory <= limit and c in self.confirmed]
        by_key = {candidate.key: candidate for candidate in sure or found}
        order = ranked((candidate.key, self.results[candidate]) for candidate in by_key.values())
        return by_key[order[0]] if order else None

    @property
    def best_mib(self) -> float | None:
        """The memory of the best."""
        best = self.best
        return self.results[best].memory_mib if best else None


class Inferred(NamedTuple):
    """An outcome that needs no measurement."""

    verdict: Verdict
    follows_from: int
    """Number of the trial."""
    reason: str


def inferences(candidates: Iterable[Candidate], known: Known) -> dict[Candidate, Inferred]:
    """Return what follows for those of the candidates that have no result."""
    found: dict[Candidate, Inferred] = {}
    for candidate in candidates:
        if candidate not in known.results:
            for inferred in _from_others(candidate, known):
                found[candidate] = inferred
                break
    return found


def _from_others(candidate: Candidate, known: Known) -> Iterator[Inferred]:
    suspects = _unsupported(known)
    for option in candidate.options:
        if option in suspects:
            number = suspects[option]
            yield Inferred(Verdict.UNSUPPORTED, number, f"{option[0]}={option[1]} as in {number}")
    for other, result in known.results.items():
        if other.options == candidate.options:
            yield from _from_one(candidate, other, result, known)


def _from_one(
    candidate: Candidate, other: Candidate, result: Measured, known: Known
) -> Iterator[Inferred]:
    number, best = known.numbers[other], known.best_mib
    if takes_no_less(candidate, other):
        if result.outcome is Outcome.OUT_OF_MEMORY:
            yield Inferred(Verdict.OUT_OF_MEMORY, number, f"{other.key} ran out of memory")
        memory = result.memory_mib
        if memory and best and memory * (1 - _MEMORY_MARGIN) > best * (1 + EQUAL_MEMORY):
            reason = f"{other.key} takes {memory:,.0f} MiB already, the best {best:,.0f}"
            yield Inferred(Verdict.TOO_LARGE, number, reason)
    high = result.speed_high
    slow = high is not None and high * (1 + _SPEED_MARGIN) < known.floor
    if slow and is_no_faster(candidate, other):
        reason = f"{other.key} reaches {high:.4g} samples/s at most"
        yield Inferred(Verdict.TOO_SLOW, number, reason)


def takes_no_less(candidate: Candidate, other: Candidate) -> bool:
    """Return whether it needs at least the other's memory, all else being equal.

    With accumulation the gradients stay alive during the next forward pass: one with it may take
    more than one without at twice the micro-batch.
    """
    alive = candidate.accumulation > 1 or other.accumulation == 1
    return candidate.micro_batch >= other.micro_batch and alive


def is_no_faster(candidate: Candidate, other: Candidate) -> bool:
    """Return whether it has no more samples per kernel launch and per optimizer step."""
    smaller = candidate.micro_batch <= other.micro_batch
    return smaller and candidate.effective_batch <= other.effective_batch


def _unsupported(known: Known) -> dict[tuple[str, Any], int]:
    """Return the settings that alone can be why a trial was unsupported."""
    good = {
        option
        for candidate, result in known.results.items()
        if result.outcome is not Outcome.UNSUPPORTED
        for option in candidate.options
    }
    suspects = {}
    for candidate, result in known.results.items():
        new = [option for option in candidate.options if option not in good]
        if result.outcome is Outcome.UNSUPPORTED and len(new) == 1:
            suspects[new[0]] = known.numbers[candidate]
    return suspects
