"""A search from its start to its answer, on a real study, with formulas for trainings."""

import pytest

from pipeline.errors import ConfigError, Interrupted
from pipeline.record import Outcome, RunRecord
from pipeline.search.answer import Answer, answer, sentences
from pipeline.search.judge import Measured
from pipeline.search.loop import Limits, Search, StoppedError, Trained
from pipeline.search.prepare import Prepared
from pipeline.search.space import Candidate
from pipeline.search.study import Study
from tests.search.conftest import Bench
from tests.search.landscape import completed

NO_LIMITS = Limits()


def rising(candidate: Candidate) -> Measured:
    """Memory and speed both rise with the micro-batch."""
    return completed(1000.0 + 100.0 * candidate.micro_batch, 10.0 * candidate.micro_batch)


def answered(prepared: Prepared, study: Study) -> Answer:
    return answer(study.name, "90%", prepared.plan, prepared.candidates, study.entries())


def test_search_measures_the_start_first_and_confirms_the_winner_last(bench: Bench) -> None:
    prepared = bench.prepared("45%")
    search, study = bench.search(prepared, rising)
    search.run(NO_LIMITS)
    assert bench.names[:3] == [f"start {n}: 4x2" for n in (1, 2, 3)]
    assert bench.names[-1] == "confirm: 2x4"
    found = answered(prepared, study)
    assert found.best is not None
    assert (found.best.configuration, found.confirmed, found.complete) == ("2x4", True, True)
    assert found.floor == pytest.approx(18.0)


def test_trials_end_early_and_the_confirmation_is_whole(bench: Bench) -> None:
    search, _ = bench.search(bench.prepared("45%"), rising)
    search.run(NO_LIMITS)
    *trials, confirmation = bench.configs
    assert {config.measurement.measure for config in trials} == {"adaptive"}
    assert trials[-1].measurement.floor == pytest.approx(18.0)
    assert trials[-1].measurement.ceiling_mib is not None
    assert confirmation.measurement.measure == "full"
    assert (confirmation.measurement.floor, confirmation.workload.max_steps) == (None, None)


def test_winner_that_fails_its_confirmation_is_demoted(bench: Bench) -> None:
    def formula(candidate: Candidate) -> Measured:
        confirming = bench.names[-1].startswith("confirm")
        slow = confirming and candidate.micro_batch == 2
        return completed(1000.0 + 100.0 * candidate.micro_batch, 1.0) if slow else rising(candidate)

    prepared = bench.prepared("45%")
    search, study = bench.search(prepared, formula)
    search.run(NO_LIMITS)
    confirmed = [name for name in bench.names if name.startswith("confirm")]
    assert confirmed == ["confirm: 2x4", "confirm: 4x2"]
    best = answered(prepared, study).best
    assert best is not None
    assert best.configuration == "4x2"


def test_nothing_reaches_the_floor_is_an_answer(bench: Bench) -> None:
    prepared = bench.prepared("1000")
    search, study = bench.search(prepared, rising)
    search.run(NO_LIMITS)
    found = answered(prepared, study)
    assert found.best is None
    words = " ".join(sentences(found))
    assert "Nothing reaches the floor of 1000 samples/s" in words
    assert "Nearest came 8x1: 1,800 MiB at 80 samples/s, 92.0% below" in words


def test_start_that_does_not_train_leaves_a_share_unknown(bench: Bench) -> None:
    prepared = bench.prepared("90%")
    search, study = bench.search(prepared, lambda _: Measured(outcome=Outcome.OUT_OF_MEMORY))
    search.run(NO_LIMITS)
    found = answered(prepared, study)
    assert found.start_failed
    assert "The start does not train here (out of memory)" in " ".join(sentences(found))


@pytest.mark.parametrize("outcome", [Outcome.OUT_OF_MEMORY, Outcome.TIMEOUT, Outcome.FAILED])
def test_trial_that_fails_is_a_row_and_the_study_goes_on(bench: Bench, outcome: Outcome) -> None:
    def formula(candidate: Candidate) -> Measured:
        if candidate.micro_batch == 8:
            return Measured(
                outcome=outcome, steps=1, message="CUDA out of memory. Tried to allocate 1.50 GiB."
            )
        return rising(candidate)

    prepared = bench.prepared("1000", sampler="grid")
    search, study = bench.search(prepared, formula)
    search.run(NO_LIMITS)
    found = answered(prepared, study)
    [row] = [row for row in found.rows if row.micro_batch == 8]
    assert (row.outcome, row.steps, row.asked_mib) == (outcome, 1, 1536.0)
    assert (found.failed, found.measured) == (1, 4)


def test_error_that_is_not_about_memory_stops_the_study_and_is_tried_anew(bench: Bench) -> None:
    prepared = bench.prepared("1", sampler="grid")
    broken = True

    def measure(config: object, *, name: str, tags: dict[str, str]) -> Trained:
        record = RunRecord(
            config=prepared.start,
            outcome=Outcome.FAILED if broken else Outcome.COMPLETED,
            message="TypeError: no" if broken else "",
            started_at=0.0,
            ended_at=1.0,
        )
        return Trained(record, "run", is_crash=False)

    study = bench.study(prepared)
    search = Search(prepared.start, prepared.plan, study, measure, bench.entries.append)
    with pytest.raises(StoppedError, match=r"trial 0 \(4x2\): TypeError: no"):
        search.run(NO_LIMITS)
    assert study.entries() == []
    broken = False
    search.run(NO_LIMITS)
    assert bench.entries[0].job.key == "start 1: 4x2"


def test_interrupted_trial_counts_as_never_begun(bench: Bench) -> None:
    prepared = bench.prepared("45%")
    calls = 0

    def formula(candidate: Candidate) -> Measured:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise Interrupted("SIGINT")
        return rising(candidate)

    search, study = bench.search(prepared, formula)
    with pytest.raises(Interrupted):
        search.run(NO_LIMITS)
    assert len(study.entries()) == 4
    again, study = bench.search(prepared, rising)
    again.run(NO_LIMITS)
    keys = [entry.job.key for entry in study.entries()]
    assert len(keys) == len(set(keys))
    found = answered(prepared, study)
    assert found.best is not None
    assert found.best.configuration == "2x4"


def test_limit_of_trials_still_gives_a_confirmed_answer(bench: Bench) -> None:
    prepared = bench.prepared("1")
    search, study = bench.search(prepared, rising)
    search.run(Limits(trials=1))
    assert search.tried == 1
    found = answered(prepared, study)
    assert found.confirmed
    assert not found.complete
    assert found.left > 0


def test_finished_study_is_not_measured_again(bench: Bench) -> None:
    prepared = bench.prepared("45%")
    search, _ = bench.search(prepared, rising)
    search.run(NO_LIMITS)
    count = len(bench.configs)
    again, _ = bench.search(prepared, rising)
    again.run(NO_LIMITS)
    assert len(bench.configs) == count


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"micro_batches": "1,2"}, "space: batches is 1x8, 2x4, 4x2, 8x1 there and 1x8, 2x4 here"),
        ({"throughput": "80%"}, "min_throughput is 90% there and 80% here"),
    ],
)
def test_changed_search_under_an_old_name_is_refused_with_the_difference(
    bench: Bench, changed: dict[str, str], words: str
) -> None:
    bench.study(bench.prepared())
    with pytest.raises(ConfigError) as raised:
        bench.study(bench.prepared(**changed))
    assert "use another study name" in raised.value.problems[0]
    assert words in raised.value.problems[1]


def test_changed_model_under_an_old_name_is_refused(bench: Bench) -> None:
    bench.study(bench.prepared())
    workload = bench.start.workload.model_copy(update={"model": "bert-base"})
    bench.start = bench.start.model_copy(update={"workload": workload})
    with pytest.raises(ConfigError, match="model is bert-small there and bert-base here"):
        bench.study(bench.prepared())


@pytest.mark.parametrize("sampler", ["tpe", "gp", "random", "grid"])
def test_other_samplers_search_too(bench: Bench, sampler: str) -> None:
    prepared = bench.prepared("45%", sampler=sampler)
    search, study = bench.search(prepared, rising)
    search.run(NO_LIMITS)
    best = answered(prepared, study).best
    assert best is not None
    assert best.configuration == "2x4"
