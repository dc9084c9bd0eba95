"""What is alive at the peak, from hand-written histories and from real objects."""

from typing import Any

import pytest
import torch
from torch import nn

from pipeline.config import RunConfig
from pipeline.launcher import Launcher
from pipeline.presets import resolve
from pipeline.record import Outcome
from pipeline.worker.ledger import PeakTrace, Storages, alive, highest, phase_at

CPU = torch.device("cpu")


def alloc(addr: int, size: int) -> dict[str, Any]:
    return {"action": "alloc", "addr": addr, "size": size}


def free(addr: int, size: int) -> list[dict[str, Any]]:
    return [{"action": f"free_{what}", "addr": addr, "size": size} for what in
            ("requested", "completed")]  # fmt: skip


# An activation at 1; a temporary where the gradient (2) will be; the peak; the gradient.
HISTORY = [alloc(1, 100), alloc(2, 30), alloc(3, 50), *free(3, 50), *free(2, 30), alloc(2, 60)]


def test_peak_is_where_most_is_allocated() -> None:
    assert highest(HISTORY) == 2
    assert highest([*free(1, 10), alloc(2, 5)]) == -1
    assert highest([]) == -1


def test_what_had_its_address_only_later_is_not_alive_at_the_peak() -> None:
    assert alive({2: 60}, HISTORY, 2) == 0
    assert alive({2: 60}, HISTORY, len(HISTORY) - 1) == 60


def test_what_the_history_does_not_mention_was_there_all_the_time() -> None:
    assert alive({9: 70, 1: 100}, HISTORY, -1) == 70
    assert alive({9: 70, 1: 100}, HISTORY, 2) == 170


def test_phase_is_the_one_that_had_begun_last() -> None:
    marks = [(10, "forward"), (20, "backward"), (30, "optimizer")]
    assert [phase_at(marks, at) for at in (5, 10, 25, 99)] == [  # type: ignore[arg-type]
        None, "forward", "backward", "optimizer",
    ]  # fmt: skip


def test_shared_storage_counts_once_and_managed_memory_apart() -> None:
    whole, paged = torch.zeros(100), torch.zeros(7)
    paged.is_paged = True  # type: ignore[attr-defined]
    found = Storages.of([{"a": whole[:50], "b": [whole[50:], paged]}], CPU)
    assert sum(found.on_device.values()) == 400
    assert found.managed == 28


def test_tensor_on_another_device_is_not_counted() -> None:
    assert Storages.of([torch.zeros(5, device="meta")], CPU).on_device == {}


def test_parts_of_a_step_are_counted_from_its_objects() -> None:
    model = nn.Linear(100, 10)
    model.register_buffer("kept", torch.zeros(25))
    optimizer = torch.optim.AdamW(model.parameters())
    trace = PeakTrace(CPU)
    trace.begin(model, compiled=False)
    model(torch.ones(1, 100)).sum().backward()
    trace.before_optimizer(model)
    optimizer.step()
    composed = trace.end(model, optimizer)
    parameters = 4 * (100 * 10 + 10)
    assert composed.weights == parameters + 100
    assert composed.gradients == parameters
    assert composed.optimizer == 2 * parameters + 2 * 4  # and a step counter per tensor
    assert composed.phase is None


@pytest.mark.parametrize("max_steps", [1, 6])
def test_peak_of_a_real_training_is_taken_apart(tiny_model: str, max_steps: int) -> None:
    settings = {"model": tiny_model, "seq_len": 16, "samples": 32, "max_steps": max_steps}
    config: RunConfig = resolve("adamw", "laptop", settings | {"device": "cpu"})
    with Launcher() as launcher:
        record = launcher.launch(config, lambda event: None).record
    assert record.outcome is Outcome.COMPLETED, record.message
    assert record.ledger
    parts = {k: v for k, v in record.metrics.items() if k.startswith("ledger/")}
    assert sorted(parts) == [
        f"ledger/{part}_mib" for part in ("activations", "gradients", "optimizer", "weights")
    ]
    assert sum(parts.values()) == pytest.approx(record.metrics["peak_memory_mib"])
    assert record.effective
    assert record.ledger.gradients == 4 * record.effective.parameters
