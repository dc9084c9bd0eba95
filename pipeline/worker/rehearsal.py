"""A training without data: the real model, Trainer and optimizer on tensors that are only shapes.

One optimizer step is enough. Its parts are put together to any number of micro-batches and steps
by `replay`: the first micro-batch makes the gradients, each further one adds to them; the first
step of the optimizer makes its state, each further one finds it there.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel, Trainer, TrainerCallback

from pipeline.cards import Card
from pipeline.config import RunConfig
from pipeline.worker.cuda_ops import cuda_behaviour
from pipeline.worker.trace import Tracer
from pipeline.worker.training import build_trainer

BUILD, FIRST, FURTHER = "build", "first micro-batch", "further micro-batch"
STEP, STEP_AGAIN, END = "first optimizer step", "further optimizer step", "end of the step"
_MICRO_BATCHES = 2
# What is computed with other numbers but in the same sizes.
_SAME_SIZES = {"fp16": "bf16", "tf32": "fp32", "fp8": "bf16"}

_Batch = dict[str, torch.Tensor]


def rehearse(config: RunConfig, card: Card) -> Tracer:
    """Run one optimizer step of at most two micro-batches and return what came and went."""
    masked = config.workload.data != "random"  # texts are padded
    config = _without_data(config)
    tracer = Tracer(card)
    tracer.begin(BUILD)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(cuda_behaviour(card.capability))
        stack.enter_context(mock.patch.object(nn.Module, "_apply", _apply))
        stack.enter_context(tracer)
        # Some models draw weights until their values suit, which these never do.
        stack.enter_context(mock.patch.object(PreTrainedModel, "initialize_weights"))
        trainer = build_trainer(config, torch.device("cpu"), _Marks(tracer), folder)
        _prepare(trainer, tracer, _batches(config, masked=masked))
        trainer.train()
    return tracer


def _without_data(config: RunConfig) -> RunConfig:
    """Return the configuration of the rehearsal: shorter, on what passes for a CPU."""
    training = config.training
    accumulation = min(training.accumulation, _MICRO_BATCHES)
    changes: dict[str, dict[str, Any]] = {
        "measurement": {"device": "cpu"},
        "training": {
            "accumulation": accumulation,
            "precision": _SAME_SIZES.get(training.precision, training.precision),
            "attention": "eager" if training.attention == "eager" else "sdpa",
            "compile": False,
        },
        "workload": {
            "init": "random",
            "data": "random",
            "max_steps": 1,
            "samples": accumulation * training.micro_batch,
        },
    }
    groups = {
        group: getattr(config, group).model_copy(update=values) for group, values in changes.items()
    }
    return config.model_copy(update=groups)


class _Marks(TrainerCallback):
    """Names the optimizer's state, and has it make a second step, for which the state is there."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See TrainerCallback."""
        inner = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])
        if getattr(inner, "is_paged", False):
            inner.is_paged = False  # managed memory is a matter of the driver, which is not there

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See TrainerCallback."""
        optimizer = kwargs["optimizer"]
        self._tracer.call("optimizer", _state(optimizer))
        self._tracer.begin(STEP_AGAIN)
        optimizer.step()
        self._tracer.begin(END)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See TrainerCallback."""
        self._tracer.begin("what follows")


def _state(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _prepare(trainer: Trainer, tracer: Tracer, batches: Sequence[_Batch]) -> None:
    """Give the Trainer batches, and have it tell the parts of a step apart."""
    model = trainer.model
    assert model is not None
    tracer.call("weights", [*model.parameters(), *model.buffers()])

    def call_gradient(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        tracer.call("gradients", [parameter.grad])

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(call_gradient)
    names, step = iter((FIRST, FURTHER)), trainer.training_step

    def training_step(*args: Any, **kwargs: Any) -> torch.Tensor:
        tracer.begin(next(names))
        loss = step(*args, **kwargs)
        tracer.begin(STEP)
        return loss

    overrides: dict[str, Any] = {
        "training_step": training_step,
        "get_train_dataloader": lambda: batches,
    }
    for name, override in overrides.items():
        setattr(trainer, name, override)


def _batches(config: RunConfig, *, masked: bool) -> Sequence[_Batch]:
    """Return what the data loader holds on the device: the step's batches."""
    micro, workload = config.training.micro_batch, config.workload

    def batch() -> _Batch:
        ids = torch.zeros(micro, workload.seq_len, dtype=torch.long)
        classify = workload.task == "sequence-classification"
        labels = torch.zeros(micro, dtype=torch.long) if classify else ids.clone()
        mask = {"attention_mask": torch.ones_like(ids)} if masked else {}
        return {"input_ids": ids, "labels": labels, **mask}

    return [batch() for _ in range(config.training.accumulation)]


def _apply(self: nn.Module, convert: Any, recurse: bool = True) -> nn.Module:
    """Convert parameters and buffers, as nn.Module does, which refuses to where they are fakes."""
    converted: dict[int, nn.Parameter] = {}
    for module in self.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in converted:
                with torch.no_grad():
                    new = convert(parameter)
                same = new is parameter
                kept = parameter if same else nn.Parameter(new, parameter.requires_grad)
                converted[id(parameter)] = kept
            if parameter is not None:
                module._parameters[name] = converted[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = convert(buffer)
    return self
