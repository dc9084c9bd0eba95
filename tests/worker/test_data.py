"""Rows are what the workload says: how many, how long, from where, with which labels."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from pipeline.config import Workload
from pipeline.errors import UnsupportedError
from pipeline.worker.data import build_dataset
from pipeline.worker.models import model_config

TEXTS = ["one", "two words", "three"]
Build = Callable[..., datasets.Dataset]


@pytest.fixture
def build(tiny_model: str) -> Build:
    """Return a function from settings of a workload to its rows."""

    def rows(**settings: Any) -> datasets.Dataset:
        known = {"model": tiny_model, "seq_len": 8, "samples": 100}
        workload = Workload.model_validate(known | settings)
        return build_dataset(workload, model_config(workload))

    return rows


def written(folder: Path, suffix: str, labels: list[Any]) -> str:
    path = folder / f"rows{suffix}"
    pairs = list(zip(TEXTS, labels, strict=True))
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS, "label": labels}), path)
    elif suffix == ".csv":
        path.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in pairs))
    else:
        rows = [json.dumps({"text": text, "label": label}) for text, label in pairs]
        path.write_text(f"[{','.join(rows)}]" if suffix == ".json" else "\n".join(rows))
    return str(path)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_random_rows_have_the_number_and_length_asked_for(build: Build) -> None:
    rows = build(samples=5, seq_len=7)
    assert rows["input_ids"][:].shape == (5, 7)


def test_random_ids_are_words_of_the_model(build: Build) -> None:
    ids = build(samples=100)["input_ids"][:]
    assert int(ids.min()) >= 100  # the first hundred are BERT's special tokens
    assert int(ids.max()) < 200


def test_random_labels_are_of_two_classes(build: Build) -> None:
    assert set(build(labels="random")["labels"][:].tolist()) == {0, 1}


def test_articles_labels_are_all_zero(build: Build) -> None:
    assert set(build(labels="zeros")["labels"][:].tolist()) == {0}


def test_seed_decides_the_rows(build: Build) -> None:
    one, same, other = (build(seed=seed)["input_ids"][:] for seed in (1, 1, 2))
    assert one.equal(same)
    assert not one.equal(other)


@pytest.mark.parametrize("task", ["masked-lm", "causal-lm"])
def test_language_model_learns_its_own_words(build: Build, task: str) -> None:
    rows = build(task=task)
    assert rows["labels"][:].equal(rows["input_ids"][:])


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".json", ".parquet"])
def test_rows_of_a_file_are_padded_to_the_length(build: Build, tmp_path: Path, suffix: str) -> None:
    rows = build(data=written(tmp_path, suffix, [0, 1, 0]))
    assert rows["input_ids"][:].shape == (3, 8)
    assert rows["attention_mask"][:].sum(dim=1).tolist() == [3, 8, 5]
    assert rows["labels"][:].tolist() == [0, 1, 0]


def test_words_as_labels_become_numbers(build: Build, tmp_path: Path) -> None:
    rows = build(data=written(tmp_path, ".csv", ["spam", "ham", "spam"]))
    assert rows["labels"][:].tolist() == [1, 0, 1]


def test_only_so_many_rows_of_a_file_are_taken(build: Build, tmp_path: Path) -> None:
    assert len(build(data=written(tmp_path, ".csv", [0, 1, 0]), samples=2)) == 2


def test_more_labels_than_the_model_knows_are_refused(build: Build, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="3 different labels, the model tells 2 apart"):
        build(data=written(tmp_path, ".csv", [0, 1, 2]))


def test_file_without_a_text_column_is_refused_with_its_columns(
    build: Build, tmp_path: Path
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("body,label\nhello,0\n")
    with pytest.raises(UnsupportedError, match="has the columns body, label"):
        build(data=str(path))


def test_samples_longer_than_the_model_takes_are_refused(tiny_model: str) -> None:
    with pytest.raises(UnsupportedError, match="seq_len=33"):
        model_config(Workload(model=tiny_model, seq_len=33))
