"""A setting that had no effect is an error; what is right but surprising, a warning."""

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from transformers import PreTrainedModel, TrainingArguments

from pipeline.config import RunConfig, Training, Workload
from pipeline.errors import NotInEffectError
from pipeline.record import Effective
from pipeline.worker.models import build_model
from pipeline.worker.proof import AutocastProbe, check, installed_autocast, read_back

SHOWN = Effective(
    parameter_dtype="float32",
    autocast_dtype=None,
    tf32=False,
    optimizer="torch.optim.adamw.AdamW (fused)",
    optimizer_state_dtypes={"float32": 8000},
    checkpointed_layers=0,
    attention="eager",
    compiled=False,
    micro_batch=4,
    accumulation=1,
    parameters=1000,
)
BITSANDBYTES = "bitsandbytes.optim.adamw.AdamW"
# transformers 5.24 renamed the method; 5.17 knows only the old name.
ENABLE = next(
    name
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    if hasattr(PreTrainedModel, name)
)
SMALL, LARGE = nn.Linear(8, 8), nn.Linear(64, 64)


def asking(config: RunConfig, **settings: Any) -> RunConfig:
    training = Training.model_validate(config.training.model_dump() | settings)
    return config.model_copy(update={"training": training})


def showing(**values: Any) -> Effective:
    return Effective.model_validate(SHOWN.model_dump() | values)


def test_training_that_shows_what_was_asked_passes_in_silence(config: RunConfig) -> None:
    assert check(config, SHOWN, SMALL) == []


IN_EFFECT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"gradient_checkpointing": True}, {"checkpointed_layers": 2}),
    ({"precision": "bf16"}, {"autocast_dtype": "bfloat16"}),
    ({"precision": "fp16"}, {"autocast_dtype": "float16"}),
    ({"precision": "fp8"}, {"autocast_dtype": "bfloat16", "float8_layers": 2}),
    ({"precision": "tf32"}, {"tf32": True}),
    ({"precision": "pure_bf16"}, {"parameter_dtype": "bfloat16"}),
    ({"compile": True}, {"compiled": True}),
    ({"attention": "sdpa"}, {"attention": "sdpa"}),
    ({"micro_batch": 2, "accumulation": 8}, {"micro_batch": 2, "accumulation": 8}),
    ({"optimizer": "adamw_torch"}, {"optimizer": "torch.optim.adamw.AdamW"}),
    ({"optimizer": "adafactor"}, {"optimizer": "transformers.optimization.Adafactor"}),
    ({"optimizer": "paged_lion_32bit"}, {"optimizer": "bitsandbytes.optim.lion.Lion"}),
]


@pytest.mark.parametrize(("asked", "shown"), IN_EFFECT)
def test_setting_in_effect_passes(
    config: RunConfig, asked: dict[str, Any], shown: dict[str, Any]
) -> None:
    assert check(asking(config, **asked), showing(**shown), SMALL) == []


@pytest.mark.parametrize("asked", [asked for asked, _ in IN_EFFECT])
def test_setting_without_effect_raises(config: RunConfig, asked: dict[str, Any]) -> None:
    with pytest.raises(NotInEffectError):
        check(asking(config, **asked), SHOWN, SMALL)


def test_any_class_may_stand_behind_other_names_of_the_trainer(config: RunConfig) -> None:
    shown = showing(optimizer="torch.optim.sgd.SGD")
    assert check(asking(config, optimizer="sgd"), shown, SMALL) == []


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("gradient_checkpointing", {"checkpointed_layers": 12}),
        ("precision", {"autocast_dtype": "bfloat16"}),
        ("precision (weights)", {"parameter_dtype": "bfloat16"}),
        ("precision (tf32)", {"tf32": True}),
        ("precision (float8 layers)", {"float8_layers": 2}),
        ("compile", {"compiled": True}),
        ("attention", {"attention": "sdpa"}),
        ("micro_batch", {"micro_batch": 2}),
        ("accumulation", {"accumulation": 2}),
        ("optimizer", {"optimizer": "transformers.optimization.Adafactor"}),
        ("optimizer", {"optimizer": "torch.optim.adamw.AdamW"}),
    ],
)
def test_effect_that_nobody_asked_for_raises_by_name(
    config: RunConfig, name: str, shown: dict[str, Any]
) -> None:
    with pytest.raises(NotInEffectError) as caught:
        check(config, showing(**shown), SMALL)
    assert str(caught.value).startswith(f"{name}=")


def test_fp8_without_a_layer_that_computes_in_it_raises(config: RunConfig) -> None:
    with pytest.raises(NotInEffectError, match="float8 layers"):
        check(asking(config, precision="fp8"), showing(autocast_dtype="bfloat16"), SMALL)


def test_message_names_what_was_asked_and_what_is_there(config: RunConfig) -> None:
    with pytest.raises(NotInEffectError) as caught:
        check(asking(config, attention="sdpa"), SHOWN, SMALL)
    assert str(caught.value) == (
        "attention='sdpa' was asked for, but the built training shows 'eager'"
    )


def test_all_settings_without_effect_are_told_at_once(config: RunConfig) -> None:
    with pytest.raises(NotInEffectError) as caught:
        check(asking(config, attention="sdpa", precision="bf16"), SHOWN, SMALL)
    assert "attention=" in str(caught.value)
    assert "precision=" in str(caught.value)


# 8-bit optimizers


def test_8_bit_optimizer_without_8_bits_on_a_large_model_raises(config: RunConfig) -> None:
    shown = showing(optimizer=BITSANDBYTES, optimizer_state_dtypes={"float32": 8000})
    with pytest.raises(NotInEffectError, match="no byte of its state is kept in 8 bits"):
        check(asking(config, optimizer="adamw_bnb_8bit"), shown, LARGE)


def test_8_bit_optimizer_without_8_bits_on_a_tiny_model_is_a_warning(config: RunConfig) -> None:
    shown = showing(optimizer=BITSANDBYTES, optimizer_state_dtypes={"float32": 8000})
    [warning] = check(asking(config, optimizer="adamw_bnb_8bit"), shown, SMALL)
    assert "small tensors stay at 32 bits" in warning


def test_embeddings_are_no_reason_to_expect_8_bits(config: RunConfig) -> None:
    shown = showing(optimizer=BITSANDBYTES, optimizer_state_dtypes={"float32": 8000})
    model = nn.Sequential(nn.Embedding(1000, 64), SMALL)
    assert len(check(asking(config, optimizer="adamw_bnb_8bit"), shown, model)) == 1


def test_8_bit_optimizer_with_8_bits_passes(config: RunConfig) -> None:
    states = {"uint8": 8000, "float32": 100}
    shown = showing(optimizer=BITSANDBYTES, optimizer_state_dtypes=states)
    assert check(asking(config, optimizer="adamw_bnb_8bit"), shown, LARGE) == []


# Reading back


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return optimizer


def arguments(**values: Any) -> TrainingArguments:
    return TrainingArguments(output_dir="unused", use_cpu=True, report_to="none", **values)


def test_optimizer_is_read_back_with_its_state_in_bytes() -> None:
    model = nn.Linear(8, 8)
    optimizer = stepped(model, torch.optim.AdamW(model.parameters(), fused=True))
    shown = read_back(model, optimizer, arguments(), None)
    assert shown.optimizer == "torch.optim.adamw.AdamW (fused)"
    moments, counters = 2 * 72 * 4, 2 * 4
    assert shown.optimizer_state_dtypes == {"float32": moments + counters}
    assert shown.parameters == 72


def test_state_that_shares_memory_counts_once() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    flat = torch.zeros(100)
    optimizer.state[model.weight] = {"first": flat[:50], "second": [flat[50:]]}
    shown = read_back(model, optimizer, arguments(), None)
    assert shown.optimizer_state_dtypes == {"float32": 400}


def test_optimizer_without_state_has_none() -> None:
    model = nn.Linear(8, 8)
    shown = read_back(model, stepped(model, torch.optim.SGD(model.parameters())), arguments(), None)
    assert shown.optimizer_bytes == 0
    assert shown.eight_bit_share is None


def test_batch_and_weights_are_read_back() -> None:
    model = nn.Linear(8, 8).bfloat16()
    args = arguments(per_device_train_batch_size=3, gradient_accumulation_steps=5)
    shown = read_back(model, torch.optim.SGD(model.parameters()), args, "bfloat16")
    assert (shown.micro_batch, shown.accumulation) == (3, 5)
    assert (shown.parameter_dtype, shown.autocast_dtype) == ("bfloat16", "bfloat16")


def test_checkpointed_layers_are_counted_on_the_model(tiny_model: str) -> None:
    model = build_model(Workload(model=tiny_model, seq_len=8), attention="sdpa")
    optimizer = torch.optim.SGD(model.parameters())
    assert read_back(model, optimizer, arguments(), None).checkpointed_layers == 0
    getattr(model, ENABLE)()
    shown = read_back(model, optimizer, arguments(), None)
    assert (shown.checkpointed_layers, shown.attention) == (2, "sdpa")


def test_float8_layers_are_counted() -> None:
    class Float8Linear(nn.Linear):  # as torchao's is called
        pass

    model = nn.Sequential(Float8Linear(8, 8), nn.Linear(8, 8), Float8Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters())
    assert read_back(model, optimizer, arguments(), None).float8_layers == 2


def test_autocast_around_a_compiled_model_is_the_one_that_is_there_not_the_setting() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        prepared = accelerator.prepare_model(nn.Linear(8, 8))
        with_it: Any = torch.compile(prepared, backend="eager")
        without_it: Any = torch.compile(nn.Linear(8, 8), backend="eager")
        assert installed_autocast(with_it) == "bfloat16"
        assert installed_autocast(without_it) is None
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_model_without_a_linear_layer_has_no_probe() -> None:
    assert AutocastProbe.of(nn.Sequential(nn.Conv1d(1, 1, 1))) is None


def test_probe_sees_the_format_of_the_computation() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    probe = AutocastProbe(model[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.ones(1, 8))
    assert probe.dtype == "bfloat16"


def test_probe_sees_no_format_without_autocast() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    probe = AutocastProbe(model[0])
    model(torch.ones(1, 8))
    assert probe.dtype is None


def test_probe_looks_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    AutocastProbe(model[0])
    model(torch.ones(1, 8))
    assert not model[0]._forward_hooks
