"""A configuration becomes the Trainer that it describes: one mapping, held by a table."""

from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.training_args import OptimizerNames

from pipeline.config import Optimizer, RunConfig
from pipeline.errors import ConfigError
from pipeline.presets import resolve
from pipeline.worker.training import build_trainer, training_arguments

CPU = torch.device("cpu")
CHECKPOINTING = (
    "activation_checkpointing"
    if "activation_checkpointing" in {field.name for field in fields(TrainingArguments)}
    else "gradient_checkpointing"
)


def asked(preset: str = "adamw", **settings: Any) -> RunConfig:
    return resolve(preset, "laptop", {"device": "cuda"} | settings)


@pytest.fixture
def tiny(tiny_model: str) -> dict[str, Any]:
    """Return the settings of a training that is built in no time."""
    return {"device": "cpu", "model": tiny_model, "seq_len": 8, "samples": 8}


def built(config: RunConfig, folder: Path) -> Any:
    """Return the Trainer; of no type, since a Trainer's may all be None."""
    trainer = build_trainer(config, CPU, TrainerCallback(), str(folder))
    assert isinstance(trainer, Trainer)
    return trainer


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("baseline", {"optim": "adafactor", "per_device_train_batch_size": 4}),
        ("accumulation", {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}),
        ("checkpointing", {CHECKPOINTING: True, "gradient_accumulation_steps": 4}),
        ("adamw", {"optim": "adamw_torch_fused", CHECKPOINTING: False}),
        ("fp16", {"fp16": True}),
        ("bf16", {"bf16": True}),
        ("tf32", {"tf32": True}),
        ("adamw8bit", {"optim": "adamw_bnb_8bit"}),
        ("torch_compile", {"torch_compile": True}),
    ],
)
def test_preset_becomes_training_arguments(preset: str, expected: dict[str, Any]) -> None:
    found = training_arguments(asked(preset))
    assert {name: found[name] for name in expected} == expected
    formats = {"fp16", "bf16", "tf32"}
    assert {name for name in formats if found.get(name)} == formats & set(expected)


@pytest.mark.parametrize("preset", ["pure_bf16", "fp8"])
def test_format_that_the_trainer_has_no_switch_for_sets_none(preset: str) -> None:
    found = training_arguments(asked(preset))
    assert not any(found.get(name) for name in ("fp16", "bf16", "tf32"))


def test_compiled_model_on_a_gpu_is_not_left_to_choose_tf32() -> None:
    assert training_arguments(asked("torch_compile"))["tf32"] is False


def test_cpu_is_not_asked_about_tf32() -> None:
    assert "tf32" not in training_arguments(asked(device="cpu"))


def test_articles_own_optimizer_has_no_name_of_the_trainers() -> None:
    assert "optim" not in training_arguments(asked("adam8bit"))


@pytest.mark.parametrize(
    ("name", "value", "argument", "expected"),
    [
        ("max_steps", 7, "max_steps", 7),
        ("epochs", 2.5, "num_train_epochs", 2.5),
        ("seed", 7, "seed", 7),
        ("learning_rate", 1e-3, "learning_rate", 1e-3),
        ("max_grad_norm", 0, "max_grad_norm", 0),
        ("device", "cpu", "use_cpu", True),
        ("device", "cuda", "use_cpu", False),
        ("device", "cpu", "dataloader_pin_memory", False),
        ("training_arguments", '{"weight_decay": 0.1}', "weight_decay", 0.1),
        ("training_arguments", '{"logging_steps": 1}', "logging_steps", 1),
    ],
)
def test_setting_becomes_a_training_argument(
    name: str, value: Any, argument: str, expected: Any
) -> None:
    assert training_arguments(asked(**{name: value}))[argument] == expected


def test_length_is_in_epochs_where_no_steps_are_set() -> None:
    assert training_arguments(asked())["max_steps"] == -1


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("report_to", "none"),
        ("save_strategy", "no"),
        ("logging_nan_inf_filter", False),
        ("disable_tqdm", True),
    ],
)
def test_nothing_but_the_measurement_is_logged_or_kept(argument: str, value: Any) -> None:
    assert training_arguments(asked())[argument] == value


def test_arguments_are_all_known_to_transformers() -> None:
    known = {field.name for field in fields(TrainingArguments)}
    assert set(training_arguments(asked("tf32"))) <= known


def test_every_optimizer_is_the_trainers_or_the_articles() -> None:
    known = {name.value for name in OptimizerNames}
    assert set(get_args(Optimizer)) - known == {"bnb_adam8bit"}


def test_trainer_reports_to_our_callback_alone(tiny: dict[str, Any], tmp_path: Path) -> None:
    trainer = built(asked(**tiny), tmp_path)
    names = {type(callback).__name__ for callback in trainer.callback_handler.callbacks}
    assert names == {"DefaultFlowCallback", "TrainerCallback"}


def test_model_and_data_are_those_of_the_workload(tiny: dict[str, Any], tmp_path: Path) -> None:
    trainer = built(asked(**tiny, attention="sdpa"), tmp_path)
    assert trainer.model.config.num_hidden_layers == 2
    assert trainer.model.config._attn_implementation == "sdpa"
    assert len(trainer.train_dataset) == 8
    assert trainer.train_dataset[0]["input_ids"].shape == (8,)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("pure_bf16", torch.bfloat16)]
)
def test_weights_have_the_format_that_was_asked_for(
    tiny: dict[str, Any], tmp_path: Path, precision: str, dtype: torch.dtype
) -> None:
    trainer = built(asked(**tiny, precision=precision), tmp_path)
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {dtype}


def test_articles_8_bit_adam_decays_all_but_biases_and_norms(
    tiny: dict[str, Any], tmp_path: Path
) -> None:
    arguments = '{"weight_decay": 0.01, "adam_beta2": 0.9}'
    config = asked(
        optimizer="bnb_adam8bit", training_arguments=arguments, learning_rate=1e-3, **tiny
    )
    trainer = built(config, tmp_path)
    optimizer = trainer.optimizer
    assert type(optimizer).__module__.startswith("bitsandbytes")
    decayed, exempt = optimizer.param_groups
    assert (decayed["weight_decay"], exempt["weight_decay"]) == (0.01, 0.0)
    assert (decayed["lr"], decayed["betas"]) == (1e-3, (0.9, 0.9))
    norms = {
        id(parameter)
        for module in trainer.model.modules()
        if isinstance(module, nn.LayerNorm)
        for parameter in module.parameters()
    }
    biases = {
        id(parameter)
        for name, parameter in trainer.model.named_parameters()
        if name.endswith("bias")
    }
    assert {id(parameter) for parameter in exempt["params"]} == norms | biases
    every = {id(parameter) for parameter in trainer.model.parameters()}
    assert {id(parameter) for parameter in decayed["params"]} == every - norms - biases


def test_other_optimizers_are_left_to_the_trainer(tiny: dict[str, Any], tmp_path: Path) -> None:
    assert built(asked(**tiny), tmp_path).optimizer is None


def test_argument_that_transformers_refuses_is_the_users_error(
    tiny: dict[str, Any], tmp_path: Path
) -> None:
    config = asked(**tiny, training_arguments='{"lr_scheduler_type": "nonsense"}')
    with pytest.raises(ConfigError, match=r"TrainingArguments: .*nonsense"):
        built(config, tmp_path)
