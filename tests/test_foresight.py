"""Predictions beside measurements: what a record says of them."""

from collections.abc import Iterator

import pytest

from pipeline.config import RunConfig
from pipeline.foresight import ERROR, PREDICTED, Foresight
from pipeline.launcher import Launcher
from pipeline.presets import resolve
from pipeline.record import Device, Outcome, RunRecord
from pipeline.report import rows

TOTAL = 150_754_820_096  # of an H200, as the driver says


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher() as launcher:
        yield launcher


@pytest.fixture
def trained() -> RunConfig:
    return resolve("adamw", "laptop", {"device": "cuda", "seq_len": 32, "micro_batch": 1})


def record(config: RunConfig, outcome: Outcome, name: str, **metrics: float) -> RunRecord:
    device = Device(kind="cuda", name=name, total_bytes=TOTAL)
    return RunRecord(
        config=config, outcome=outcome, started_at=0, ended_at=1, device=device, metrics=metrics
    )


def test_a_run_on_a_known_card_shows_its_prediction(launcher: Launcher, trained: RunConfig) -> None:
    foresight = Foresight(launcher)
    measured = record(
        trained, Outcome.COMPLETED, "NVIDIA H200", **{"peak_memory_mib": 1000.0, "tflops": 2.0}
    )
    beside = foresight.beside(measured)
    predicted = beside.metrics[PREDICTED]
    assert predicted > 742  # what the context and its kernels take
    assert beside.metrics[ERROR] == pytest.approx((predicted / 1000 - 1) * 100)
    assert beside.metrics["tflops"] == 2.0
    assert dict(rows(beside))["peak memory, predicted"].endswith(" %)")
    full = record(trained, Outcome.OUT_OF_MEMORY, "NVIDIA H200", peak_memory_mib=900.0)
    figures = foresight.beside(full).metrics
    assert figures[PREDICTED] == predicted
    assert ERROR not in figures  # it never came to its peak


def test_where_nothing_can_be_said_the_record_says_why(
    launcher: Launcher, trained: RunConfig
) -> None:
    beside = Foresight(launcher).beside(record(trained, Outcome.COMPLETED, "NVIDIA Model Zero"))
    assert PREDICTED not in beside.metrics
    assert "NVIDIA Model Zero" in beside.warnings[0]


def test_trainings_on_cpus_and_failed_ones_are_left_alone(
    launcher: Launcher, trained: RunConfig
) -> None:
    failed = record(trained, Outcome.FAILED, "NVIDIA H200")
    on_cpu = record(trained, Outcome.COMPLETED, "some CPU")
    on_cpu = on_cpu.model_copy(update={"device": Device(kind="cpu", name="some CPU")})
    for each in (failed, on_cpu):
        assert Foresight(launcher).beside(each) == each
