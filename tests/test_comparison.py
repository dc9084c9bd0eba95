"""Rows against the first one: medians, spread, what is clear and what is noise."""

import csv
import io
from typing import Any

import pytest

from pipeline.comparison import LEDGER, Comparison, Measured, compared, last_loss, thinned
from pipeline.comparison_text import change, csv_text, explanation, headline, markdown, table
from pipeline.config import Label, RunConfig
from pipeline.presets import Ladder, ladder
from pipeline.record import MIB, Device, MemorySample, Outcome, RunRecord

CARD = Device(kind="cuda", name="NVIDIA H200")


@pytest.fixture
def training(config: RunConfig) -> Any:
    def measured(
        preset: str,
        peak: float,
        speed: float,
        spread: float = 0.02,
        ledger: tuple[float, ...] = (),
        **values: Any,
    ) -> Measured:
        metrics = {
            "peak_memory_mib": peak,
            "samples_per_second": speed,
            "samples_per_second_low": speed * (1 - spread),
            "samples_per_second_high": speed * (1 + spread),
        }
        parts = dict(zip((f"ledger/{part}_mib" for part in LEDGER), ledger, strict=False))
        known = {
            "outcome": Outcome.COMPLETED,
            "started_at": 0.0,
            "ended_at": 1.0,
            "device": CARD,
            "memory_source": "nvml_process",
            "metrics": metrics | parts,
            "config": config.model_copy(update={"preset": Label(name=preset, why="It saves.")}),
        }
        return Measured(f"run-{preset}", RunRecord(**(known | values)), (), 0.7)

    return measured


def of(*rows: list[Measured], presets: tuple[str, ...] = ()) -> Comparison:
    names = presets or tuple(runs[0].record.config.preset.name for runs in rows)
    return compared(Ladder("mine", names), rows, "laptop", repeats=max(map(len, rows)))


def test_row_is_the_median_of_its_repeats_with_their_spread(training: Any) -> None:
    runs = [training("a", peak, speed) for peak, speed in ((100, 10), (104, 12), (101, 30))]
    [row] = of(runs).rows
    assert row.memory
    assert row.speed
    assert (row.memory.median, row.memory.low, row.memory.high) == (101, 100, 104)
    assert (row.speed.median, row.speed.high) == (12, 30.6)
    assert row.speed.low == pytest.approx(9.8)
    assert row.repeats == 3


def test_first_row_has_no_change(training: Any) -> None:
    first, second = of([training("a", 1000, 10)], [training("b", 500, 20)]).rows
    assert (first.memory_change, first.speed_change) == (None, None)
    assert second.memory_change
    assert second.memory_change.percent == -50


@pytest.mark.parametrize(
    ("peak", "speed", "clear_memory", "clear_speed"),
    [(500, 20, True, True), (991, 10.2, False, False), (985, 10.5, True, True)],
)
def test_difference_inside_the_noise_is_no_win(
    training: Any, peak: float, speed: float, clear_memory: bool, clear_speed: bool
) -> None:
    row = of([training("a", 1000, 10)], [training("b", peak, speed)]).rows[1]
    assert row.memory_change
    assert row.speed_change
    assert (row.memory_change.clear, row.speed_change.clear) == (clear_memory, clear_speed)


def test_repeats_that_differ_more_than_the_rows_are_noise(training: Any) -> None:
    first = [training("a", peak, 10) for peak in (900, 1000, 1100)]
    row = of(first, [training("b", 920, 10)]).rows[1]
    assert change(row.memory_change) == "about the same (-8.0 %)"


def test_row_that_ran_out_of_memory_says_so_and_is_no_candidate(training: Any) -> None:
    failed = training("b", 5, 5, outcome=Outcome.OUT_OF_MEMORY, message="no 2 GiB left")
    comparison = of([training("a", 1000, 10)], [failed])
    row = comparison.rows[1]
    assert (row.repeats, row.memory, row.trouble) == (0, None, "out of memory: no 2 GiB left")
    assert [r.preset for r in comparison.candidates] == ["a"]
    assert "- (out of memory)" in table(comparison)[1][1]
    assert "b: out of memory: no 2 GiB left." in markdown(comparison)


def test_row_that_diverged_is_never_best(training: Any) -> None:
    comparison = of([training("a", 1000, 10)], [training("b", 100, 10, diverged=True)])
    assert headline(comparison) == "No preset takes clearly less memory than a."


def test_figures_of_a_cpu_are_not_set_against_those_of_a_gpu(training: Any) -> None:
    on_cpu = training("b", 100, 10, memory_source="process_uss")
    comparison = of([training("a", 1000, 10)], [on_cpu])
    assert comparison.rows[1].memory_change is None
    assert [row.preset for row in comparison.candidates] == ["a"]


def test_headline_names_the_least_memory_and_what_it_costs(training: Any) -> None:
    rows = [training("a", 1000, 10)], [training("b", 500, 8)], [training("c", 700, 20)]
    assert headline(of(*rows)) == (
        "Least memory: **b** with 500 MiB, -50 % against a at -20 % throughput."
    )


def test_row_explains_itself_by_the_parts_that_moved(training: Any) -> None:
    first = training("a", 1000, 10, ledger=(400, 100, 200, 200, 50, 50))
    second = training("b", 700, 8, ledger=(400, 400, 0, 150, 0, 48))
    comparison = of([first], [second])
    assert explanation(comparison.rows[1], comparison.rows[0]) == (
        "It saves. Measured against a: gradients +300 MiB; optimizer -200 MiB; activations "
        "-50 MiB; unused -50 MiB. Peak memory -300 MiB, -30 %, throughput -20 %."
    )


def test_parts_of_a_row_are_those_of_one_training(training: Any) -> None:
    runs = [
        training("a", peak, 10, ledger=(peak - 60, 10, 20, 30, 0, 0)) for peak in (90, 300, 100)
    ]
    [row] = of(runs).rows
    assert sum(row.ledger.values()) == 100


def test_row_that_was_not_reached_is_told(training: Any) -> None:
    comparison = of([training("a", 1000, 10)], [], presets=("a", "b"))
    assert comparison.rows[1].trouble == "not measured"
    assert comparison.rows[1].preset == "b"


def test_articles_figures_are_shown_as_change_alone(training: Any) -> None:
    article = ladder("article")
    rows = [[training(name, 1000, 10)] for name in article.presets]
    comparison = compared(article, rows, "article", repeats=1)
    heads, cells = table(comparison)
    assert heads[-2:] == ["ref. memory", "ref. samples/s"]
    assert [row[-2:] for row in cells[:2]] == [["", ""], ["-28 %", "-19 %"]]
    assert "5790" not in markdown(comparison)


def test_csv_has_plain_numbers_for_every_row(training: Any) -> None:
    text = csv_text(of([training("a", 1000, 10)], [training("b", 500, 20)]))
    first, second = csv.DictReader(io.StringIO(text))
    assert (first["preset"], first["peak_memory_mib"]) == ("a", "1000.0")
    assert first["memory_change_percent"] == ""
    assert (second["memory_change_percent"], second["memory_change_is_clear"]) == ("-50.0", "true")


def test_curve_keeps_its_peak_however_few_points_are_left() -> None:
    samples = [MemorySample(i / 100, (900 if i == 777 else i % 50) * MIB) for i in range(5000)]
    points = thinned([*samples, MemorySample(50.0, None)], points=100)
    assert len(points) <= 101
    assert max(points, key=lambda point: point[1]) == (7.77, 900)


def test_last_loss_is_the_one_that_was_logged_last() -> None:
    assert last_loss([{"loss": 0.9}, {"loss": 0.5}, {"grad_norm": 1.0}]) == 0.5
    assert last_loss([]) is None
