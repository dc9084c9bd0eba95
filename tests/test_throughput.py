"""Step times become a rate with an interval that means what it says."""

from collections.abc import Sequence

import numpy as np
import pytest

from pipeline.throughput import MIN_TIMED_STEPS, Rate, percentile_ms, rate, warmup_length

NOISE_SHARE = 0.1


def noisy(generator: np.random.Generator, count: int, seconds: float) -> list[float]:
    return list(generator.normal(seconds, NOISE_SHARE * seconds, count))


def known(samples: Sequence[int], seconds: Sequence[float]) -> Rate:
    found = rate(samples, seconds)
    assert found is not None
    return found


def test_steady_steps_give_their_rate_with_no_width() -> None:
    found = known([8] * 10, [0.5] * 10)
    assert (found.low, found.mean, found.high) == pytest.approx((16, 16, 16))


def test_rate_is_all_samples_over_all_seconds() -> None:
    assert known([24, 24, 12, 24, 24], [3.0, 3.0, 1.0, 3.0, 2.0]).mean == pytest.approx(108 / 12)


@pytest.mark.parametrize("steps", [6, 20, 64, 500])
def test_interval_covers_the_truth_in_95_percent_of_trainings(steps: int) -> None:
    generator = np.random.default_rng(0)
    trials, truth = 1000, 4 / 0.1
    found = [known([4] * steps, noisy(generator, steps, 0.1)) for _ in range(trials)]
    covered = sum(r.low <= truth <= r.high for r in found) / trials
    assert 0.93 <= covered <= 0.97


def test_interval_allows_for_steps_that_resemble_their_neighbours() -> None:
    generator = np.random.default_rng(1)
    trials, truth, covered = 400, 4 / 0.1, 0
    for _ in range(trials):
        wander = np.zeros(400)
        for i in range(1, 400):
            wander[i] = 0.6 * wander[i - 1] + generator.normal(0, 0.01)
        found = known([4] * 400, list(0.1 + wander))
        covered += found.low <= truth <= found.high
    # One that takes all 400 as independent covers the truth in two of three trainings.
    assert covered / trials >= 0.88


def test_more_steps_give_a_narrower_interval() -> None:
    generator = np.random.default_rng(2)
    few, many = (known([4] * n, noisy(generator, n, 0.1)) for n in (20, 2000))
    assert many.relative_half_width < few.relative_half_width / 3


def test_interval_stays_finite_however_scattered_the_steps() -> None:
    found = known([4] * 4, [0.001, 0.001, 0.001, 10.0])
    assert 0 < found.low < found.mean < found.high < 1e6


@pytest.mark.parametrize("steps", [0, 1, MIN_TIMED_STEPS - 1])
def test_too_few_steps_give_no_rate(steps: int) -> None:
    assert rate([4] * steps, [0.1] * steps) is None


def test_least_number_of_steps_gives_a_rate() -> None:
    assert rate([4] * MIN_TIMED_STEPS, [0.1] * MIN_TIMED_STEPS) is not None


def test_steps_without_samples_or_time_give_no_rate() -> None:
    assert rate([0] * 10, [0.1] * 10) is None
    assert rate([4] * 10, [0.0] * 10) is None


def test_compilation_beyond_the_fixed_warm_up_is_left_out() -> None:
    generator = np.random.default_rng(3)
    steps = [0.01, 44.0, 0.9, 0.3, *noisy(generator, 40, 0.0044)]
    assert 4 <= warmup_length(steps, 1) <= 8


def test_steady_steps_lose_no_more_than_the_fixed_warm_up() -> None:
    assert warmup_length([0.5] * 50, 3) == 3


def test_noise_never_costs_more_than_half_of_the_steps() -> None:
    generator = np.random.default_rng(4)
    for count in (11, 20, 57, 200):
        for _ in range(50):
            steps = list(generator.lognormal(0, 1, count))
            assert 3 <= warmup_length(steps, 3) <= 3 + (count - 3) // 2


def test_warm_up_that_never_ends_costs_half_of_the_steps() -> None:
    falling = [1 / (i + 1) for i in range(43)]
    assert warmup_length(falling, 3) == 3 + 20


@pytest.mark.parametrize("count", [3, 5, 10])
def test_short_training_loses_the_fixed_warm_up_alone(count: int) -> None:
    assert warmup_length([5.0] * 3 + [1.0, 9.0] * count, 3) >= 3
    assert warmup_length([44.0] * count, 3) == 3


def test_training_shorter_than_the_warm_up_is_all_warm_up() -> None:
    assert warmup_length([0.1, 0.1], 3) == 2


def test_percentile_is_in_milliseconds() -> None:
    assert percentile_ms([0.1, 0.2, 0.3], 50) == pytest.approx(200)


def test_interval_after_the_warm_up_rule_covers_the_truth_as_well() -> None:
    generator = np.random.default_rng(5)
    trials, truth, covered = 1000, 4 / 0.1, 0
    for _ in range(trials):
        seconds = [2.0, 1.0, 0.3, *noisy(generator, 61, 0.1)]
        skip = warmup_length(seconds, 3)
        found = known([4] * (len(seconds) - skip), seconds[skip:])
        covered += found.low <= truth <= found.high
    assert 0.93 <= covered / trials <= 0.97
