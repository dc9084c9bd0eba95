"""Counted samples are those that went through the model, and times count from the origin."""

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from transformers import Trainer, TrainingArguments

from pipeline.record import Event, StepMark, Steps
from pipeline.worker.callback import MemoryCallback
from pipeline.worker.steps import BatchCounter, HostClock

Row = dict[str, torch.Tensor]


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.last(self.first(x)).square().mean()}


class Rows(Dataset[Row]):
    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Row:
        if index >= self._count:
            raise IndexError
        return {"x": torch.ones(2)}


class Endless(IterableDataset[Row]):
    def __iter__(self) -> Iterator[Row]:
        while True:
            yield {"x": torch.ones(2)}


class CountingTrainer(Trainer):
    """Knows the truth: how many rows reach the model in each optimizer step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.truth: Counter[int] = Counter()

    def training_step(self, model: nn.Module, inputs: Row, *args: Any) -> torch.Tensor:
        self.truth[self.state.global_step + 1] += len(inputs["x"])
        loss: torch.Tensor = super().training_step(model, inputs, *args)
        return loss


def train(data: Any, folder: Path, **arguments: Any) -> tuple[list[StepMark], Counter[int]]:
    """Return the steps that the callback tells of, and the true rows of each step."""
    events: list[Event] = []
    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **arguments,
    )
    callback = MemoryCallback(events.append)
    trainer = CountingTrainer(
        model=TwoLayers(), args=args, train_dataset=data, callbacks=[callback]
    )
    trainer.train()
    return [row for event in events if isinstance(event, Steps) for row in event.rows], (
        trainer.truth
    )


@pytest.mark.parametrize(
    ("rows", "batch", "accumulation", "more", "total"),
    [
        (10, 8, 4, {"max_steps": 6}, 60),
        (61, 8, 1, {"num_train_epochs": 1}, 61),
        (61, 8, 1, {"num_train_epochs": 1, "dataloader_drop_last": True}, 56),
        (61, 8, 4, {"num_train_epochs": 2, "dataloader_drop_last": True}, 112),
        (60, 8, 3, {"max_steps": 5}, 108),
        (60, 8, 3, {"num_train_epochs": 1}, 60),
        (64, 8, 4, {"num_train_epochs": 2}, 128),
        (5, 32, 1, {"max_steps": 3}, 15),
    ],
)
def test_counted_samples_are_those_that_the_model_saw(
    tmp_path: Path, rows: int, batch: int, accumulation: int, more: dict[str, Any], total: int
) -> None:
    marks, truth = train(
        Rows(rows),
        tmp_path,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        **more,
    )
    assert {mark.step: mark.samples for mark in marks} == truth
    assert sum(truth.values()) == total


def test_stream_of_unknown_length_is_not_counted(tmp_path: Path) -> None:
    marks, truth = train(Endless(), tmp_path, per_device_train_batch_size=8, max_steps=3)
    assert sum(truth.values()) == 24
    assert [mark.samples for mark in marks] == [None, None, None]


def test_every_process_counts_for_its_own_batch() -> None:
    counter = BatchCounter(100, 8, drop_last=False, world_size=4)
    counter.next_micro_batch()
    assert counter.end_step() == 32


def test_step_without_micro_batches_has_no_samples() -> None:
    counter = BatchCounter(100, 8, drop_last=False, world_size=1)
    counter.next_micro_batch()
    assert (counter.end_step(), counter.end_step()) == (8, 0)


def test_host_clock_counts_from_its_origin() -> None:
    clock = HostClock(time.perf_counter() - 100)
    clock.begin()
    time.sleep(0.02)
    clock.end(1, 4, None)
    [mark] = clock.known()
    assert 100 <= mark.begun < mark.ended < 110
    assert mark.ended - mark.begun >= 0.02
    assert (mark.step, mark.samples) == (1, 4)


def test_host_clock_tells_each_step_once() -> None:
    clock = HostClock(time.perf_counter())
    clock.end(1, 4, None)
    assert len(clock.known()) == 1
    assert clock.known(wait=True) == []
