"""What cannot be logged does not end somebody's training, and is told once."""

from collections.abc import Mapping
from typing import Any

import pytest
from mlflow.exceptions import MlflowException

from pipeline.errors import TrackingError
from pipeline.record import Device, Effective, Finished, Outcome, Proven, Started
from pipeline.script_run import RunLogger

STARTED = Started(
    device=Device(kind="cuda", name="NVIDIA H200"),
    memory_source="nvml_process",
    versions={},
    clock=0.0,
)
PROVEN = Proven(
    effective=Effective(
        parameter_dtype="float32",
        autocast_dtype=None,
        tf32=False,
        optimizer="torch.optim.adamw.AdamW",
        checkpointed_layers=0,
        attention="sdpa",
        compiled=False,
        micro_batch=4,
        accumulation=1,
        parameters=1000,
    )
)


class Tracked:
    """As TrackedRun; of a server that is gone, if it is told so."""

    run_id = "abc"

    def __init__(self, gone: bool = False, unsent: int = 0) -> None:
        self.gone = gone
        self.writer = self
        self.unsent = unsent
        self.tags: dict[str, str] = {}
        self.metrics: dict[str, float] = {}

    def handle(self, event: Any) -> None:
        pass

    def close(self) -> TrackingError | None:
        lost = f"{self.unsent} points could not be sent: the server is gone"
        return TrackingError(lost) if self.unsent else None

    def _reach(self) -> None:
        if self.gone:
            raise MlflowException("the server is gone")

    def tag(self, tags: Mapping[str, str]) -> None:
        self._reach()
        self.tags |= tags

    def params(self, values: Mapping[str, Any]) -> list[str]:
        self._reach()
        return ["param training.micro_batch=4: the run has another value already"]

    def summary(self, metrics: Mapping[str, float], ended_at: float) -> None:
        self._reach()
        self.metrics |= metrics


def closed(
    tracked: Any, outcome: Outcome = Outcome.COMPLETED, warnings: tuple[str, ...] = ()
) -> None:
    logger = RunLogger(tracked, own_run=False)
    logger.handle(STARTED)
    logger.handle(PROVEN)
    finished = Finished(outcome=outcome, memory_source="nvml_device")
    logger.close(finished, {"peak_memory_mib": 7.0}, list(warnings))


def test_server_that_is_gone_costs_one_warning_of_each_kind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    closed(Tracked(gone=True, unsent=12))
    told = [record.getMessage() for record in caplog.records]
    assert [message.partition(": ")[0] for message in told] == [
        f"MLflow run abc lacks {kind}" for kind in ("tags", "params", "curves", "summary")
    ]
    assert "12 points could not be sent: the server is gone" in told[2]


def test_param_that_mlflow_refused_is_told(caplog: pytest.LogCaptureFixture) -> None:
    closed(Tracked())
    [record] = caplog.records
    assert "the run has another value already" in record.getMessage()


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Outcome.COMPLETED, {"outcome": "completed"}),
        (Outcome.FAILED, {"outcome": "failed", "partial": "true"}),
    ],
)
def test_end_of_the_training_is_tagged_with_what_only_the_end_knows(
    outcome: Outcome, expected: dict[str, str]
) -> None:
    tracked = Tracked()
    closed(tracked, outcome, ("another process came", "gradients overflow"))
    assert tracked.metrics == {"peak_memory_mib": 7.0}
    assert tracked.tags == expected | {
        "device.name": "NVIDIA H200",
        "memory.source": "nvml_device",
        "warnings": "another process came\ngradients overflow",
    }
