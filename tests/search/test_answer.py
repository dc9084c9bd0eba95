"""What a study says: in words, as a table and as a figure."""

import csv
from pathlib import Path

import pytest

from pipeline.record import Outcome
from pipeline.search.answer import Answer, answer, line, pareto, sentences, trials_csv
from pipeline.search.figure import write_html, write_png
from pipeline.search.jobs import Entry, Job
from pipeline.search.judge import Measured, Verdict, measured, ranked, verdict
from pipeline.search.space import Candidate
from tests.search.conftest import Bench, trained
from tests.search.landscape import completed

START = Candidate(4, 2)


def found(bench: Bench, throughput: str, *more: Entry) -> Answer:
    prepared = bench.prepared(throughput)
    start = Entry(0, Job("start", START), completed(1400.0, 40.0))
    return answer("s", throughput, prepared.plan, prepared.candidates, [start, *more])


FASTER = Entry(1, Job("trial", Candidate(8, 1)), completed(1800.0, 80.0))
SMALLER = Entry(2, Job("trial", Candidate(2, 4)), completed(1200.0, 20.0))
FAILED = Entry(
    3,
    Job("trial", Candidate(1, 8)),
    Measured(outcome=Outcome.OUT_OF_MEMORY, memory_mib=900.0, steps=2, asked_mib=1536.0),
)


def test_answer_tells_saving_margin_and_counts(bench: Bench) -> None:
    words = " ".join(sentences(found(bench, "15", FASTER, SMALLER, FAILED)))
    assert "Least memory: 2x4, 1,200 MiB at 20 samples/s (not confirmed yet)" in words
    assert "-14.3% of memory against the start (4x2, 1,400 MiB at 40 samples/s)" in words
    assert "Its throughput is +33.3% against the floor of 15 samples/s" in words
    assert "4 configurations measured (1 of them failed), 0 inferred" in words


def test_line_of_a_trial_that_failed_says_at_which_step_and_what_it_asked_for(
    bench: Bench,
) -> None:
    answered = found(bench, "15", FAILED)
    [row] = [row for row in answered.rows if row.trial == 3]
    assert line(row, answered.best) == (
        "  3 trial   1x8: 900 MiB, out of memory after 2 steps, asking for 1,536 MiB"
        "   best so far: 4x2, 1,400 MiB at 40 samples/s"
    )


def test_table_has_a_row_for_every_trial_and_nothing_for_what_was_not_measured(
    bench: Bench,
) -> None:
    answered = found(bench, "15", FASTER, SMALLER, FAILED)
    rows = list(csv.DictReader(trials_csv(answered.rows).splitlines()))
    assert [row["trial"] for row in rows] == ["0", "1", "2", "3"]
    assert rows[-1]["samples_per_second"] == ""
    assert rows[-1]["verdict"] == "out of memory"


def test_pareto_front_leaves_out_what_is_beaten_and_what_failed(bench: Bench) -> None:
    beaten = Entry(4, Job("trial", Candidate(1, 8)), completed(1500.0, 30.0))
    front = pareto(found(bench, "15", FASTER, SMALLER, beaten, FAILED).rows)
    assert [row.configuration for row in front] == ["2x4", "4x2", "8x1"]


@pytest.mark.parametrize("throughput", ["15", "1000"])
def test_figures_are_drawn_with_and_without_a_winner(
    bench: Bench, tmp_path: Path, throughput: str
) -> None:
    answered = found(bench, throughput, FASTER, SMALLER, FAILED)
    write_png(answered, tmp_path / "search.png")
    write_html(answered, tmp_path / "search.html")
    assert (tmp_path / "search.png").stat().st_size > 10_000
    page = (tmp_path / "search.html").read_text()
    assert "Pareto front" in page
    assert "<script src=" not in page


def test_only_an_interval_wholly_below_the_floor_is_too_slow() -> None:
    result = completed(1000.0, 100.0)
    assert verdict(result, 102.9) is Verdict.FEASIBLE
    assert verdict(result, 103.1) is Verdict.TOO_SLOW


def test_of_equal_memory_the_faster_is_better() -> None:
    rows = [("a", completed(1000.0, 10.0)), ("b", completed(1009.0, 20.0))]
    assert ranked([*rows, ("c", completed(1011.0, 90.0))]) == ["b", "a", "c"]


def test_diverged_training_is_no_candidate() -> None:
    result = completed(1000.0, 100.0).model_copy(update={"diverged": True})
    assert verdict(result, 1.0) is Verdict.DIVERGED


@pytest.mark.parametrize(
    ("message", "mib"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has", 20.0),
        ("CUDA out of memory. Tried to allocate 1.50 GiB.", 1536.0),
        ("CUBLAS_STATUS_ALLOC_FAILED", None),
    ],
)
def test_bytes_asked_for_are_read_from_the_message(
    bench: Bench, message: str, mib: float | None
) -> None:
    result = Measured(outcome=Outcome.OUT_OF_MEMORY, message=message)
    assert measured(trained(bench.start, result, 1).record).asked_mib == mib
