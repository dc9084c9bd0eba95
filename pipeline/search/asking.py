"""Optuna's own samplers, to compare with.

They are asked on a copy of the study in memory: what they propose twice, or what contradicts
itself, is answered there at once and never measured.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.trial import TrialState, create_trial

from pipeline.search.judge import shortfall
from pipeline.search.monotone import Inferred, Known
from pipeline.search.space import Candidate
from pipeline.search.study import NOTHING_MIB, distributions, parameters

_MAX_REPEATS = 50
"""So many known proposals in a row say that the sampler has nothing new."""


class Asking:
    """Asks a sampler of Optuna's."""

    def __init__(
        self, candidates: Sequence[Candidate], make: Callable[[int], BaseSampler], seed: int
    ) -> None:
        self._space = distributions(candidates)
        self._known = {_row(parameters(c, self._space)): c for c in candidates}
        self._make = make
        self._seed = seed

    def choose(self, known: Known) -> Candidate | None:
        """See Sampler."""
        study = self._copy(known)
        if all(c in known.results for c in self._known.values()):
            return None
        for _ in range(_MAX_REPEATS):
            trial = study.ask(dict(self._space))
            candidate = self._known.get(_row(trial.params))
            if candidate and candidate not in known.results and candidate not in known.taken:
                return candidate
            result = known.results.get(candidate) if candidate else None
            missing = shortfall(result, known.floor) if result else 1.0
            trial.set_constraint("floor", missing)
            study.tell(trial, (result.memory_mib if result else None) or NOTHING_MIB)
        return None

    def inferred(self, known: Known) -> Mapping[Candidate, Inferred]:
        """See Sampler."""
        return {}

    def _copy(self, known: Known) -> optuna.Study:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            sampler = self._make(self._seed + len(known.results) + len(known.taken))
        study = optuna.create_study(sampler=sampler)
        for candidate, result in known.results.items():
            if candidate in self._known.values():
                study.add_trial(
                    create_trial(
                        state=TrialState.COMPLETE,
                        value=result.memory_mib or NOTHING_MIB,
                        params=parameters(candidate, self._space),
                        distributions=dict(self._space),
                        constraints={"floor": shortfall(result, known.floor)},
                    )
                )
        return study


def _row(values: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(values.items()))


def tpe(candidates: Sequence[Candidate], seed: int) -> Asking:
    """Return Optuna's default sampler."""
    return Asking(candidates, lambda own: TPESampler(seed=own), seed)


def gp(candidates: Sequence[Candidate], seed: int) -> Asking:
    """Return Optuna's Gaussian-process sampler."""
    return Asking(candidates, lambda own: GPSampler(seed=own), seed)
