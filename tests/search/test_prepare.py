"""What a search is asked for: read, checked, and refused in one line before anything is started."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ConfigError
from pipeline.paths import names
from pipeline.search.prepare import Asked, prepare
from pipeline.search.space import Candidate, batches, candidates, numbers, read_space
from tests.search.conftest import Bench


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"throughput": "fast"}, "min_throughput='fast': expected samples per second (30)"),
        ({"throughput": "-1"}, "min_throughput='-1': expected"),
        ({"throughput": "90%!"}, "min_throughput='90%!': expected"),
        ({"micro_batches": "3"}, "micro_batches: 3 does not divide effective_batch=8"),
        ({"sampler": "best"}, "sampler='best': expected one of frugal, tpe, gp, grid, random"),
        ({"space": "batches"}, "space='batches': expected one of batch, full or a YAML file"),
        ({"effective_batch": "8..4"}, "effective_batch='8..4': expected whole numbers above 0"),
        ({"effective_batch": "0"}, "effective_batch='0': expected whole numbers above 0"),
        ({"micro_batches": "1,x"}, "micro_batches='1,x': expected whole numbers above 0"),
    ],
)
def test_bad_input_names_the_option_and_the_value(
    bench: Bench, asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        bench.prepared(**asked)
    assert words in str(raised.value)


def test_too_few_steps_to_time_are_refused(bench: Bench) -> None:
    workload = bench.start.workload.model_copy(update={"max_steps": 5})
    bench.start = bench.start.model_copy(update={"workload": workload})
    with pytest.raises(ConfigError, match="max_steps=5: a search needs 7: 3 of warm-up and 4"):
        bench.prepared()


def test_effective_batch_beyond_a_file_is_refused(bench: Bench, tmp_path: Path) -> None:
    data = tmp_path / "rows.csv"
    data.write_text("text,label\n" + "a,0\n" * 6)
    workload = bench.start.workload.model_copy(update={"data": str(data)})
    bench.start = bench.start.model_copy(update={"workload": workload})
    with pytest.raises(ConfigError, match="effective_batch=8: more than the data has"):
        bench.prepared()


@pytest.mark.parametrize(
    ("text", "found"),
    [("32", [32]), ("1,2,4", [1, 2, 4]), ("8..64", [8, 16, 32, 64]), ("3..13", [3, 6, 12])],
)
def test_numbers_are_one_or_a_list_or_a_range_that_doubles(text: str, found: list[int]) -> None:
    assert numbers("n", text) == found


def test_batches_are_all_that_make_up_the_effective_batch(bench: Bench) -> None:
    assert batches(bench.start.training, [12], []) == [
        (1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1),
    ]  # fmt: skip
    assert batches(bench.start.training, [4, 8], [2, 4]) == [(2, 2), (2, 4), (4, 1), (4, 2)]


def test_micro_batches_alone_keep_the_accumulation_of_the_start(bench: Bench) -> None:
    assert batches(bench.start.training, [], [4096, 1, 4]) == [(1, 1), (4, 1), (4096, 1)]


def test_random_data_is_made_to_fill_a_batch(bench: Bench) -> None:
    assert Candidate(4096, 1).applied(bench.start).workload.samples == 4096


def test_start_takes_the_largest_part_of_the_effective_batch_it_may(bench: Bench) -> None:
    plan = prepare(Asked("90%", effective_batch="6"), bench.start).plan
    assert plan.start == Candidate(3, 2)


@pytest.mark.parametrize("name", names("spaces"))
def test_shipped_space_is_sound(bench: Bench, name: str) -> None:
    assert bench.prepared(space=name).candidates


def test_contradicting_settings_are_never_proposed(bench: Bench) -> None:
    dimensions = read_space("full")
    found = candidates(bench.start, [(1, 1)], dimensions)
    assert {dict(c.options)["precision"] for c in found} == {"fp32", "bf16", "pure_bf16"}
    assert {dict(c.options)["alloc_conf"] for c in found} == {None}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("precision: bf16", "precision='bf16': expected a list of values"),
        ("precision: [bf17]", "precision='bf17': Input should be"),
        ("precison: [bf16]", "did you mean 'precision'?"),
        ("micro_batch: [1]", "the batch is set by effective_batch and micro_batches"),
    ],
)
def test_own_space_is_refused_with_file_key_and_value(
    tmp_path: Path, content: str, words: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(content + "\n")
    with pytest.raises(ConfigError) as raised:
        read_space(str(path))
    assert str(path) in str(raised.value)
    assert words in str(raised.value)
