"""The parts of a peak sum to it, or are not told."""

import pytest

from pipeline.ledger import taken_apart
from pipeline.record import Composed, Finished, MemorySource, Outcome

COUNTED = Composed(weights=400, gradients=300, optimizer=200, managed=50, phase="backward")


def finished(
    allocated: int | None, reserved: int | None, source: MemorySource = "nvml_process"
) -> Finished:
    return Finished(
        outcome=Outcome.COMPLETED,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        memory_source=source,
    )


def test_parts_of_a_gpus_peak_sum_to_it() -> None:
    ledger = taken_apart(2000, COUNTED, finished(1200, 1500))
    assert ledger
    parts = ledger.model_dump(exclude={"phase"})
    assert parts == {
        "weights": 400,
        "gradients": 300,
        "optimizer": 200,
        "activations": 300,
        "unused": 300,
        "context": 500,
    }
    assert sum(parts.values()) == 2000
    assert ledger.phase == "backward"


def test_pages_of_a_paged_optimizer_are_its_state_where_the_device_shows_them() -> None:
    ledger = taken_apart(2000, COUNTED, finished(1200, 1500, "nvml_device"))
    assert ledger
    assert (ledger.optimizer, ledger.context) == (250, 450)


def test_rest_of_a_cpus_peak_is_one_part() -> None:
    ledger = taken_apart(1000, COUNTED, finished(None, None, "process_uss"))
    assert ledger
    assert (ledger.activations, ledger.unused, ledger.context) == (100, None, None)


@pytest.mark.parametrize(
    ("peak", "allocated", "reserved"), [(2000, 800, 1500), (1400, 1200, 1500), (800, None, None)]
)
def test_parts_that_do_not_fit_are_not_told(
    peak: int, allocated: int | None, reserved: int | None
) -> None:
    assert taken_apart(peak, COUNTED, finished(allocated, reserved)) is None
