"""The configuration is frozen, typed and closed."""

import math
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.config import FIELDS, GROUPS, Measurement, RunConfig, Training, Workload


def test_unknown_field_is_refused() -> None:
    with pytest.raises(ValidationError, match="learnin_rate"):
        Training.model_validate({"learnin_rate": 1e-4})


@pytest.mark.parametrize("name", ["micro_batch", "accumulation"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "many"])
def test_batch_that_is_no_positive_whole_number_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=name):
        Training.model_validate({name: value})


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1e-4])
def test_learning_rate_that_is_not_positive_and_finite_is_refused(value: float) -> None:
    with pytest.raises(ValidationError, match="learning_rate"):
        Training(learning_rate=value)


@pytest.mark.parametrize(
    ("model", "name", "value"),
    [
        (Training, "precision", "int4"),
        (Training, "optimizer", "adam8bit"),
        (Training, "attention", "fast"),
        (Workload, "task", "translation"),
        (Measurement, "measure", "quick"),
    ],
)
def test_value_that_is_no_choice_is_refused(model: Any, name: str, value: str) -> None:
    with pytest.raises(ValidationError, match=name):
        model.model_validate({name: value})


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_that_numpy_does_not_take_is_refused(seed: int) -> None:
    with pytest.raises(ValidationError, match="seed"):
        Workload(seed=seed)
    assert Workload(seed=2**32 - 1)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1"])
def test_device_can_be_named(device: str) -> None:
    assert Measurement(device=device).device == device


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "1", "cpu:0"])
def test_device_that_is_none_is_refused(device: str) -> None:
    with pytest.raises(ValidationError, match="device"):
        Measurement(device=device)


def test_setting_cannot_be_changed_afterwards(config: RunConfig) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        config.training.micro_batch = 8  # type: ignore[misc]


def test_training_arguments_cannot_be_changed_afterwards() -> None:
    given = {"weight_decay": 0.1}
    training = Training(training_arguments=given)
    given["weight_decay"] = 0.2
    assert training.training_arguments == {"weight_decay": 0.1}
    with pytest.raises(TypeError):
        training.training_arguments["weight_decay"] = 0.3  # type: ignore[index]


@pytest.mark.parametrize("text", ["", " ", "''", "none"])
def test_empty_text_means_not_set(text: str) -> None:
    assert Workload.model_validate({"max_steps": text}).max_steps is None


def test_json_round_trip_gives_an_equal_configuration(config: RunConfig) -> None:
    training = config.training.model_copy(update={"training_arguments": {"weight_decay": 0.1}})
    changed = config.model_copy(update={"training": training})
    assert RunConfig.model_validate_json(changed.model_dump_json()) == changed


def test_effective_batch_is_micro_batch_times_accumulation() -> None:
    assert Training(micro_batch=3, accumulation=5).effective_batch == 15


def test_dotted_names_cover_every_setting(config: RunConfig) -> None:
    names = {f"{group}.{name}" for name, group in FIELDS.items()}
    more = {"preset.name", "workload.name", "training.effective_batch"}
    assert set(config.dotted()) == names | more


def test_flat_names_are_the_keys_of_a_file(config: RunConfig) -> None:
    assert set(config.flat()) == set(FIELDS)


def test_no_two_groups_have_a_setting_of_one_name() -> None:
    assert len(FIELDS) == sum(len(model.model_fields) for model in GROUPS.values())


def test_every_setting_says_what_it_is() -> None:
    silent = [
        name
        for model in GROUPS.values()
        for name, field in model.model_fields.items()
        if not field.description
    ]
    assert silent == []
