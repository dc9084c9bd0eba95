"""From a run configuration to the Trainer that runs it."""

from dataclasses import fields
from typing import Any

import datasets
import torch
from torch import nn
from transformers import (
    DefaultDataCollator,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_pt_utils import get_parameter_names

from pipeline.config import RunConfig
from pipeline.errors import ConfigError
from pipeline.worker.data import build_dataset
from pipeline.worker.models import build_model

_LOG_EVERY_STEPS = 10
# transformers 5.24 renamed the argument; 5.17 knows only the old name.
_CHECKPOINTING = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in {field.name for field in fields(TrainingArguments)}
)
_PRECISIONS: dict[str, dict[str, Any]] = {"bf16": {"bf16": True}, "fp16": {"fp16": True}}


def training_arguments(config: RunConfig) -> dict[str, Any]:
    """Return the keyword arguments of transformers.TrainingArguments for this run: one mapping."""
    workload, training = config.workload, config.training
    on_cpu = config.measurement.device == "cpu"
    optimizer = {} if training.optimizer == "bnb_adam8bit" else {"optim": training.optimizer}
    return {
        "output_dir": "trainer_output",
        "per_device_train_batch_size": training.micro_batch,
        "gradient_accumulation_steps": training.accumulation,
        "num_train_epochs": workload.epochs,
        "max_steps": workload.max_steps or -1,
        "seed": workload.seed,
        "learning_rate": training.learning_rate,
        "max_grad_norm": training.max_grad_norm,
        "torch_compile": training.compile,
        _CHECKPOINTING: training.gradient_checkpointing,
        "use_cpu": on_cpu,
        "dataloader_pin_memory": not on_cpu,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "steps",
        "logging_steps": _LOG_EVERY_STEPS,
        # The filter would hide a loss that is not finite, and make the host wait for each one.
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,
        # Left open, the Trainer turns it on behind a compiled model.
        **({} if on_cpu else {"tf32": training.precision == "tf32"}),
        **optimizer,
        **_PRECISIONS.get(training.precision, {}),
        **training.training_arguments,
    }


def build_trainer(
    config: RunConfig, device: torch.device, callback: TrainerCallback, output_dir: str
) -> Trainer:
    """Return a Trainer, ready to train, that reports to this callback alone."""
    arguments = training_arguments(config) | {"output_dir": output_dir}
    try:
        args = TrainingArguments(**arguments)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"transformers.TrainingArguments: {error}") from error
    with device:
        model = build_model(config.workload, config.training.attention)
    if config.workload.task != "causal-lm":
        # These heads take any keyword and pass over `num_items_in_batch`: the Trainer, which looks
        # at the signature alone, would add up the micro-batches' losses instead of averaging them.
        model.accepts_loss_kwargs = False  # type: ignore[assignment]
    if config.training.precision == "pure_bf16":
        model.bfloat16()
    dataset: datasets.Dataset = build_dataset(config.workload, model.config)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=dataset,
        data_collator=DefaultDataCollator(),
        callbacks=[callback],
        optimizers=(_own_optimizer(config, model, args), None),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _own_optimizer(
    config: RunConfig, model: PreTrainedModel, args: TrainingArguments
) -> torch.optim.Optimizer | None:
    """Return the article's 8-bit Adam, the one optimizer that the Trainer has no name for."""
    if config.training.optimizer != "bnb_adam8bit":
        return None
    import bitsandbytes as bnb  # initialises CUDA, so only where it is used

    decay = set(get_parameter_names(model, [nn.LayerNorm], ["bias"]))
    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if name in decay], "weight_decay": args.weight_decay},
        {"params": [p for name, p in named if name not in decay], "weight_decay": 0.0},
    ]
    return bnb.optim.Adam8bit(
        groups,
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
    )
