"""What can be known to be wrong is told before anything starts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from pipeline.config import RunConfig
from pipeline.errors import ConfigError
from pipeline.preflight import default_workload, pick_device, prepare
from pipeline.presets import resolve

Resolve = Callable[..., RunConfig]


@pytest.fixture
def asked() -> Resolve:
    """Return a function from settings to a configuration for the CPU."""
    return lambda **settings: resolve("adamw", "laptop", {"device": "cpu"} | settings)


def problems(config: RunConfig) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        prepare(config)
    return list(caught.value.problems)


def csv_of(path: Path, rows: int) -> str:
    path.write_text("text,label\n" + "".join(f'"row\n{i}",{i % 2}\n' for i in range(rows)))
    return str(path)


def test_good_configuration_passes_unchanged(asked: Resolve) -> None:
    assert prepare(asked()) == asked()


# Data


def test_batch_larger_than_the_data_is_refused_with_both_numbers(
    asked: Resolve, tmp_path: Path
) -> None:
    [problem] = problems(asked(data=csv_of(tmp_path / "d.csv", 5), micro_batch=32))
    assert "micro_batch=32" in problem
    assert "5 rows" in problem
    assert "at most 5" in problem


def test_batch_of_all_the_data_passes(asked: Resolve, tmp_path: Path) -> None:
    prepare(asked(data=csv_of(tmp_path / "d.csv", 5), micro_batch=5))


def test_batch_larger_than_the_random_data_is_refused(asked: Resolve) -> None:
    [problem] = problems(asked(samples=10, micro_batch=32))
    assert "samples=10" in problem


def test_only_as_many_rows_count_as_samples_takes(asked: Resolve, tmp_path: Path) -> None:
    [problem] = problems(asked(data=csv_of(tmp_path / "d.csv", 50), samples=8, micro_batch=16))
    assert "at most 8" in problem


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("header.csv", "text,label\n"),
        ("empty.csv", ""),
        ("empty.jsonl", ""),
        ("blank.jsonl", "\n\n"),
        ("empty.json", "[]"),
    ],
)
def test_data_without_rows_is_refused_by_file(
    asked: Resolve, tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    [problem] = problems(asked(data=str(tmp_path / name)))
    assert problem.endswith(f"no rows in {tmp_path / name}")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("d.jsonl", '{"text": "a"}\n{"text": "b"}\n\n'),
        ("d.json", '[{"text": "a"}, {"text": "b"}]'),
    ],
)
def test_rows_of_json_are_counted(asked: Resolve, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    prepare(asked(task="causal-lm", data=str(tmp_path / name), micro_batch=2))
    [problem] = problems(asked(task="causal-lm", data=str(tmp_path / name), micro_batch=3))
    assert "2 rows" in problem


def test_rows_of_parquet_are_counted(asked: Resolve, tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b", "c"]}), path)
    prepare(asked(task="causal-lm", data=str(path), micro_batch=3))
    [problem] = problems(asked(task="causal-lm", data=str(path), micro_batch=4))
    assert "3 rows" in problem


def table_of(path: Path, *rows: dict[str, Any]) -> str:
    """Write the same rows in the form that the file's name asks for."""
    if path.suffix == ".csv":
        lines = [list(rows[0]), *(row.values() for row in rows)]
        path.write_text("".join(",".join(map(str, line)) + "\n" for line in lines))
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text(json.dumps(rows))
    return str(path)


FORMS = ["d.csv", "d.parquet", "d.jsonl", "d.json"]


@pytest.mark.parametrize("form", FORMS)
def test_data_without_the_columns_is_refused_with_those_it_has(
    asked: Resolve, tmp_path: Path, form: str
) -> None:
    data = table_of(tmp_path / form, {"a": 1, "b": 2})
    text, label = problems(asked(data=data, micro_batch=1))
    assert "has the columns a, b; one of them has to be named text or sentence or content" in text
    assert label.endswith("label or labels")
    [problem] = problems(asked(data=data, micro_batch=1, task="masked-lm"))
    assert problem == text


@pytest.mark.parametrize("form", FORMS)
def test_more_labels_than_the_model_tells_apart_are_refused(
    asked: Resolve, tmp_path: Path, tiny_model: str, form: str
) -> None:
    rows = [{"text": "a", "label": number} for number in (0, 1, 1, 2)]
    data = table_of(tmp_path / form, *rows)
    [problem] = problems(asked(data=data))
    assert "3 different labels, the model tells 2 apart" in problem
    prepare(asked(data=data, samples=3, micro_batch=1))
    prepare(asked(data=data, task="causal-lm"))
    three = tmp_path / "three.json"
    three.write_text(json.dumps(json.loads(Path(tiny_model).read_text()) | {"num_labels": 3}))
    prepare(asked(data=data, model=str(three), seq_len=32))


def test_label_that_is_written_two_ways_is_one(asked: Resolve, tmp_path: Path) -> None:
    rows = [{"text": "a", "label": label} for label in ("1", "1.0", "0", "")]
    prepare(asked(data=table_of(tmp_path / "d.csv", *rows), micro_batch=1))


def test_object_of_several_lines_is_left_to_the_loader(asked: Resolve, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{\n"text": "a",\n"label": 0}\n')
    prepare(asked(data=str(tmp_path / "d.jsonl"), micro_batch=1))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("d.parquet", b"no parquet"),
        ("d.json", b"[1, "),
        ("d.csv", b"text\n\xff\xfe\n"),
        ("long.csv", b"text\n" + b"x" * 200_000 + b"\n"),
    ],
)
def test_data_that_cannot_be_read_is_refused_by_file(
    asked: Resolve, tmp_path: Path, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    [problem] = problems(asked(data=str(tmp_path / name)))
    assert f"{name}': cannot be read: " in problem


def test_missing_data_is_refused(asked: Resolve, tmp_path: Path) -> None:
    [problem] = problems(asked(data=str(tmp_path / "d.csv")))
    assert "cannot be read: No such file" in problem


def test_data_of_an_unknown_kind_is_refused_with_the_known_ones(asked: Resolve) -> None:
    [problem] = problems(asked(data="rows.xlsx"))
    assert ".csv, .jsonl, .json, .parquet" in problem


# Model


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "cannot be read as JSON"), ("{}", "has no model_type"), ("[]", "has no model_type")],
)
def test_model_file_that_is_no_configuration_is_refused(
    asked: Resolve, tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "model.json"
    path.write_text(content)
    [problem] = problems(asked(model=str(path)))
    assert str(path) in problem
    assert message in problem


def test_missing_model_file_is_refused_with_the_shipped_ones(asked: Resolve) -> None:
    [problem] = problems(asked(model="bert.json"))
    assert "there is no such file; shipped are bert-base, " in problem


def test_model_whose_name_no_file_can_have_is_refused(asked: Resolve) -> None:
    [problem] = problems(asked(model="x" * 300))
    assert problem.endswith("cannot be read: File name too long")


@pytest.mark.parametrize("name", ["model.json", "rows.csv"])
def test_file_in_a_forbidden_folder_is_refused(
    asked: Resolve, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def forbid(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    config = asked(**{"model" if name == "model.json" else "data": f"forbidden/{name}"})
    monkeypatch.setattr(Path, "is_file", forbid)  # root may read everything
    monkeypatch.setattr(Path, "open", forbid)
    [problem] = [problem for problem in problems(config) if name in problem]
    assert "cannot be read: Permission denied" in problem


def test_model_file_without_end_is_refused(asked: Resolve, tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    [problem] = problems(asked(model=str(tmp_path / "deep.json")))
    assert "cannot be read as JSON" in problem


def test_hub_id_is_left_to_the_hub(asked: Resolve) -> None:
    assert prepare(asked(model="prajjwal1/bert-tiny")).workload.model == "prajjwal1/bert-tiny"


def test_weights_cannot_come_from_a_configuration(asked: Resolve) -> None:
    [problem] = problems(asked(init="pretrained"))
    assert "a configuration has no weights" in problem


def test_samples_longer_than_the_model_takes_are_refused(asked: Resolve, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"model_type": "bert", "max_position_embeddings": 64}))
    [problem] = problems(asked(model=str(path), seq_len=65))
    assert problem.startswith("seq_len=65")
    prepare(asked(model=str(path), seq_len=64))


def test_problems_of_model_and_data_are_told_together(asked: Resolve) -> None:
    assert len(problems(asked(model="bert.json", data="rows.xlsx"))) == 2


# Device


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_device_that_was_named_is_taken(device: str) -> None:
    assert pick_device(device) == device


@pytest.mark.parametrize("visible", ["", "-1"])
def test_hidden_gpus_mean_the_cpu(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert pick_device("auto") == "cpu"


def machine(monkeypatch: pytest.MonkeyPatch, gpus: list[str], torch_version: str) -> None:
    """Pretend to be on a machine with these GPUs and this torch."""
    monkeypatch.setattr("pipeline.nvml.usable_gpus", lambda: gpus)
    monkeypatch.setattr("pipeline.preflight.version", lambda name: torch_version)


@pytest.mark.parametrize(
    ("gpus", "torch_version", "device", "workload"),
    [
        (["H200"], "2.13.0+cu130", "cuda", "article"),
        (["H200"], "2.13.0", "cuda", "article"),
        (["H200"], "2.13.0+cpu", "cpu", "laptop"),
        ([], "2.13.0", "cpu", "laptop"),
    ],
)
def test_auto_takes_what_driver_and_torch_can_use(
    monkeypatch: pytest.MonkeyPatch,
    gpus: list[str],
    torch_version: str,
    device: str,
    workload: str,
) -> None:
    machine(monkeypatch, gpus, torch_version)
    assert pick_device("auto") == device
    assert default_workload("auto")[0] == workload


def test_prepared_configuration_names_its_device(
    monkeypatch: pytest.MonkeyPatch, asked: Resolve
) -> None:
    machine(monkeypatch, [], "2.13.0")
    settings: dict[str, Any] = {"device": "auto", "timeout": "5"}
    measurement = prepare(asked(**settings)).measurement
    assert (measurement.device, measurement.timeout) == ("cpu", 5.0)
