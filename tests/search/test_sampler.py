"""The frugal sampler finds the optimum, with few trials, and never measures twice."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.record import Outcome
from pipeline.search import asking
from pipeline.search.judge import Measured, Verdict
from pipeline.search.monotone import Known
from pipeline.search.sampler import Frugal, InOrder, Sampler, shuffled
from pipeline.search.space import Candidate
from tests.search.landscape import SETTINGS, completed, least, monotone, sampled, space, training

_EQUAL = 1.01


def found(known: Known) -> float | None:
    return min((m.memory_mib or 0.0 for m in known.feasible.values()), default=None)


def start_of(candidates: Sequence[Candidate]) -> Candidate:
    return next(c for c in candidates if c.micro_batch == 4)


@given(
    seed=st.integers(0, 10**6), share=st.floats(0.2, 3.0), batch=st.sampled_from([4, 12, 32, 48])
)
@settings(deadline=None, max_examples=60, derandomize=True)
def test_frugal_is_exact_where_only_the_batch_varies(seed: int, share: float, batch: int) -> None:
    candidates, formula = space(batch, {}), monotone(seed, batch)
    start = start_of(candidates)
    floor = (formula(start).speed or 0.0) * share
    known = sampled(Frugal(candidates), start, formula, floor)
    best, right = found(known), least(candidates, formula, floor)
    assert (best is None) == (right is None)
    assert best is None or right is None or best <= right * _EQUAL


@given(seed=st.integers(0, 10**6), share=st.floats(0.3, 2.0))
@settings(deadline=None, max_examples=25, derandomize=True)
def test_frugal_finds_the_best_settings_with_a_fifth_of_the_trials(seed: int, share: float) -> None:
    candidates, formula = space(32, SETTINGS), training(seed)
    start = start_of(candidates)
    floor = (formula(start).speed or 0.0) * share
    known = sampled(Frugal(candidates), start, formula, floor)
    best, right = found(known), least(candidates, formula, floor)
    assert (best is None) == (right is None)
    assert best is None or right is None or best <= right * 1.02
    assert len(known.results) <= len(candidates) / 5


@pytest.mark.parametrize("seed", range(3))
def test_frugal_learns_from_trials_that_fail(seed: int) -> None:
    candidates, whole = space(32, SETTINGS), training(seed)

    def formula(candidate: Candidate) -> Measured:
        result = whole(candidate)
        if (result.memory_mib or 0.0) < 3000:
            return result
        return Measured(outcome=Outcome.OUT_OF_MEMORY, memory_mib=2900.0)

    start = start_of(candidates)
    known = sampled(Frugal(candidates), start, formula, 20.0)
    assert found(known) == pytest.approx(least(candidates, formula, 20.0), rel=0.01)
    assert len(known.results) < len(candidates) / 2


def test_setting_that_is_unsupported_is_tried_once() -> None:
    candidates = space(8, {"precision": ["fp32", "fp8"]})

    def formula(candidate: Candidate) -> Measured:
        if ("precision", "fp8") in candidate.options:
            return Measured(outcome=Outcome.UNSUPPORTED, message="no")
        return completed(1000.0 + candidate.micro_batch, 50.0 * candidate.micro_batch)

    sampler = Frugal(candidates)
    known = sampled(sampler, candidates[0], formula, 60.0)
    tried = [c for c in known.results if ("precision", "fp8") in c.options]
    assert len(tried) == 1
    verdicts = [inferred.verdict for inferred in sampler.inferred(known).values()]
    assert verdicts.count(Verdict.UNSUPPORTED) == 3


def test_every_configuration_that_was_not_measured_says_from_which_trial_it_follows() -> None:
    candidates, formula = space(32, SETTINGS), training(1)
    sampler, start = Frugal(candidates), start_of(candidates)
    known = sampled(sampler, start, formula, (formula(start).speed or 0.0) * 0.9)
    inferred = sampler.inferred(known)
    assert set(inferred) | set(known.results) == set(candidates)
    assert {i.follows_from for i in inferred.values()} <= set(known.numbers.values())
    assert all(inferred[c].reason for c in inferred)


def test_prediction_far_beyond_the_limit_is_believed() -> None:
    candidates = space(8, {})
    sampler = Frugal(candidates, predict=lambda c: 1000.0 * c.micro_batch, limit_mib=3000)
    known = Known(10.0, {candidates[0]: completed(1000.0, 5.0)}, {candidates[0]: 0})
    verdicts = {c.micro_batch: i.verdict for c, i in sampler.inferred(known).items()}
    assert verdicts[4] is verdicts[8] is Verdict.OUT_OF_MEMORY
    assert 2 not in verdicts


@pytest.mark.parametrize("make", [InOrder, lambda c: shuffled(c, 1)])
def test_samplers_to_compare_with_measure_everything_once(
    make: Callable[[Sequence[Candidate]], Sampler],
) -> None:
    candidates, formula = space(8, {"precision": ["fp32", "bf16"]}), training(0)
    known = sampled(make(candidates), candidates[0], formula, 1.0)
    assert set(known.results) == set(candidates)


@pytest.mark.parametrize("make", [asking.tpe, asking.gp])
def test_samplers_of_optuna_never_repeat_a_trial(
    make: Callable[[Sequence[Candidate], int], Sampler],
) -> None:
    candidates, formula = space(8, {"precision": ["fp32", "bf16"]}), training(0)
    known = sampled(make(candidates, 3), candidates[0], formula, 1.0)
    assert 4 <= len(known.results) <= len(candidates)
