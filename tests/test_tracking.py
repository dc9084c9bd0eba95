"""MLflow runs in a real store: what is in them, and how they end."""

import math
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import mlflow
import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from pipeline import processes
from pipeline.config import RunConfig
from pipeline.errors import Interrupted, TrackingError
from pipeline.record import (
    MIB,
    Built,
    Device,
    Event,
    Finished,
    Logged,
    MemorySample,
    Outcome,
    RunRecord,
    Samples,
    Started,
    StepMark,
    Steps,
)
from pipeline.recorder import Recorder
from pipeline.stores import opening
from pipeline.tracking import (
    TrackedRun,
    close_stale_runs,
    connect,
    end_run,
    end_unopened_run,
    parent_run,
    tracked_run,
)
from pipeline.writer import RunWriter

EVENTS: tuple[Event, ...] = (
    Started(
        device=Device(kind="cpu", name="CPU of a test"),
        memory_source="process_uss",
        versions={"torch": "2.13.0"},
        clock=100.0,
        requested=99.0,
    ),
    Built(total_steps=6, asked_batch=4, arguments={}),
    Samples(rows=tuple(MemorySample(i * 0.5, (10 + i % 5) * MIB) for i in range(13))),
    Steps(rows=tuple(StepMark(i, i - 0.9, float(i), 4) for i in range(1, 7))),
    Logged(step=3, values={"loss": 0.7}),
    Logged(step=6, values={"loss": math.nan}),
    Finished(outcome=Outcome.COMPLETED, metrics={"train_loss": math.nan, "train_runtime": 6.0}),
)


@pytest.fixture(scope="module", autouse=True)
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("store")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    experiment = mlflow.create_experiment("tests", artifact_location=str(folder / "artifacts"))
    mlflow.set_experiment(experiment_id=experiment)
    yield
    mlflow.set_tracking_uri(before)


@pytest.fixture(autouse=True)
def _no_run_is_left_open() -> Iterator[None]:
    yield
    assert mlflow.active_run() is None


@pytest.fixture
def client() -> MlflowClient:
    return connect()


def record_of(config: RunConfig, outcome: Outcome, interrupted: bool = False) -> RunRecord:
    recorder = Recorder(warmup_steps=1)
    for event in EVENTS:
        recorder.handle(event)
    message = "" if outcome is Outcome.COMPLETED else "the reason"
    return recorder.record(config, outcome, message, interrupted)


def train(
    client: MlflowClient,
    config: RunConfig,
    outcome: Outcome = Outcome.COMPLETED,
    interrupted: bool = False,
    artifacts: Path | None = None,
) -> Run:
    """Log a whole training and return the run as the store has it."""
    record = record_of(config, outcome, interrupted)
    with tracked_run(client, config, time.time()) as tracked:
        for event in EVENTS:
            tracked.handle(event)
        tracked.finish(record, "the note", artifacts)
        end_run(record)
    return client.get_run(tracked.writer.run_id)


def open_run(client: MlflowClient, host: str, process: str) -> str:
    run = client.create_run(
        experiment_id(), tags={"pipeline.host": host, "pipeline.process": process}
    )
    return str(run.info.run_id)


def experiment_id() -> str:
    experiment = mlflow.get_experiment_by_name("tests")
    assert experiment
    return str(experiment.experiment_id)


def dead_process() -> str:
    """Return the identity of a process that has ended."""
    code = "from pipeline import processes; print(processes.identity())"
    root = Path(__file__).resolve().parents[1]
    return subprocess.check_output([sys.executable, "-c", code], cwd=root, text=True).strip()


@pytest.fixture(scope="module")
def completed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    from pipeline.presets import resolve

    folder = tmp_path_factory.mktemp("files")
    (folder / "record.json").write_text("{}")
    return train(connect(), resolve("adamw", "laptop", {"device": "cpu"}), artifacts=folder)


def test_every_setting_is_a_param_under_its_dotted_name(completed: Run, config: RunConfig) -> None:
    assert set(config.dotted()) <= set(completed.data.params)
    assert completed.data.params["training.micro_batch"] == "4"
    assert completed.data.params["training.gradient_checkpointing"] == "false"
    assert completed.data.params["workload.max_steps"] == "none"
    assert completed.data.params["training.effective_batch"] == "4"


def test_summary_has_the_names_that_people_rely_on(completed: Run) -> None:
    expected = {"peak_memory_mib", "samples_per_second", "step_time_p50_ms", "train_runtime"}
    assert expected <= set(completed.data.metrics)
    assert completed.data.metrics["peak_memory_mib"] == 14.0


def test_memory_curve_counts_milliseconds(completed: Run, client: MlflowClient) -> None:
    points = client.get_metric_history(completed.info.run_id, "memory/process_mib")
    assert [point.step for point in points] == [i * 500 for i in range(13)]
    assert [point.value for point in points] == [10.0 + i % 5 for i in range(13)]


def test_one_point_per_step_and_metric(completed: Run, client: MlflowClient) -> None:
    points = client.get_metric_history(completed.info.run_id, "step/time_ms")
    assert [point.step for point in points] == [1, 2, 3, 4, 5, 6]


def test_loss_that_is_not_finite_is_never_sent(completed: Run, client: MlflowClient) -> None:
    points = client.get_metric_history(completed.info.run_id, "step/loss")
    assert [(point.step, point.value) for point in points] == [(3, 0.7)]
    assert "train_loss" not in completed.data.metrics
    assert all(map(math.isfinite, completed.data.metrics.values()))
    assert completed.data.tags["diverged"] == "true"


def test_tags_tell_outcome_device_and_note(completed: Run) -> None:
    tags = completed.data.tags
    assert tags["outcome"] == "completed"
    assert tags["device.name"] == "CPU of a test"
    assert tags["memory.source"] == "process_uss"
    assert tags["version.torch"] == "2.13.0"
    assert tags["mlflow.note.content"] == "the note"
    assert tags["mlflow.runName"] == "adamw on laptop"
    assert "partial" not in tags


def test_data_set_is_an_input(completed: Run) -> None:
    assert completed.inputs
    (found,) = completed.inputs.dataset_inputs
    assert found.dataset.name == "random-256x128"
    assert {tag.key: tag.value for tag in found.tags} == {"mlflow.data.context": "training"}


def test_files_are_artifacts(completed: Run, client: MlflowClient) -> None:
    assert [file.path for file in client.list_artifacts(completed.info.run_id)] == ["record.json"]


@pytest.mark.parametrize(
    ("outcome", "interrupted", "status"),
    [
        (Outcome.COMPLETED, False, "FINISHED"),
        (Outcome.OUT_OF_MEMORY, False, "FAILED"),
        (Outcome.UNSUPPORTED, False, "FAILED"),
        (Outcome.TIMEOUT, False, "FAILED"),
        (Outcome.FAILED, False, "FAILED"),
        (Outcome.FAILED, True, "KILLED"),
    ],
)
def test_status_belongs_to_the_outcome(
    client: MlflowClient, config: RunConfig, outcome: Outcome, interrupted: bool, status: str
) -> None:
    run = train(client, config, outcome, interrupted)
    assert run.info.status == status
    assert run.info.end_time
    assert run.data.tags["outcome"] == outcome.value
    assert run.data.tags.get("partial") == (None if outcome is Outcome.COMPLETED else "true")
    assert run.data.tags.get("reason") == (None if outcome is Outcome.COMPLETED else "the reason")


def test_run_of_mlflow_run_is_adopted(
    client: MlflowClient, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = client.create_run(experiment_id())
    client.log_param(made.info.run_id, "learning_rate", "0.00005")
    monkeypatch.setenv("MLFLOW_RUN_ID", made.info.run_id)
    run = train(client, config)
    assert run.info.run_id == made.info.run_id
    assert run.data.params["learning_rate"] == "0.00005"
    assert run.data.params["training.learning_rate"] == "5e-05"


def test_one_clash_does_not_lose_the_other_params(client: MlflowClient) -> None:
    run = client.create_run(experiment_id())
    client.log_param(run.info.run_id, "training.seed", "1")
    values = {f"training.{number}": number for number in range(150)} | {"training.seed": 2}
    refused = RunWriter(client, run).params(values)
    client.set_terminated(run.info.run_id)
    assert len(refused) == 1
    assert "training.seed=2" in refused[0]
    assert len(client.get_run(run.info.run_id).data.params) == 151


def test_param_that_mlflow_refuses_is_told(
    client: MlflowClient,
    config: RunConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = client.create_run(experiment_id())
    client.log_param(made.info.run_id, "training.micro_batch", "77")
    monkeypatch.setenv("MLFLOW_RUN_ID", made.info.run_id)
    train(client, config)
    assert "training.micro_batch=4" in caplog.text


def test_value_longer_than_mlflow_takes_is_cut(client: MlflowClient) -> None:
    run = client.create_run(experiment_id())
    writer = RunWriter(client, run)
    assert writer.params({"long": "x" * 7000}) == []
    writer.tag({"long": "x" * 9000})
    client.set_terminated(run.info.run_id)
    data = client.get_run(run.info.run_id).data
    assert (len(data.params["long"]), len(data.tags["long"])) == (6000, 8000)


def test_trainings_inside_a_parent_run_are_its_children(
    client: MlflowClient, config: RunConfig
) -> None:
    with parent_run(client, "the parent", {"compare.repeats": 2}) as parent:
        children = [train(client, config), train(client, config, Outcome.OUT_OF_MEMORY)]
    assert {child.data.tags["mlflow.parentRunId"] for child in children} == {parent.run_id}
    assert [child.info.status for child in children] == ["FINISHED", "FAILED"]
    run = client.get_run(parent.run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "the parent")
    assert run.data.params == {"compare.repeats": "2"}


@pytest.mark.parametrize(
    ("error", "status"), [(ZeroDivisionError("by zero"), "FAILED"), (Interrupted("INT"), "KILLED")]
)
def test_parent_run_that_is_broken_off_says_so(
    client: MlflowClient, config: RunConfig, error: BaseException, status: str
) -> None:
    seen = []

    def broken_off() -> None:
        with parent_run(client, "the parent", {}) as parent:
            seen.append((parent.run_id, train(client, config).info.run_id))
            raise error

    with pytest.raises(type(error)):
        broken_off()
    [(parent, child)] = seen
    assert client.get_run(parent).info.status == status
    assert client.get_run(child).info.status == "FINISHED"


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (ZeroDivisionError("by zero"), "FAILED", "ZeroDivisionError: by zero"),
        (Interrupted("SIGTERM"), "KILLED", "interrupted: SIGTERM"),
    ],
)
def test_run_that_has_no_record_ends_with_a_reason(
    client: MlflowClient, config: RunConfig, error: BaseException, status: str, reason: str
) -> None:
    seen: list[str] = []

    def raise_after_training() -> None:
        with tracked_run(client, config, time.time()) as tracked:
            seen.append(tracked.writer.run_id)
            for event in EVENTS:
                tracked.handle(event)
            raise error

    with pytest.raises(type(error)):
        raise_after_training()
    assert "curve-sender" not in [thread.name for thread in threading.enumerate()]
    assert len(client.get_metric_history(seen[0], "step/time_ms")) == 6
    run = client.get_run(seen[0])
    assert run.info.status == status
    assert run.info.end_time
    assert (run.data.tags["outcome"], run.data.tags["reason"]) == ("failed", reason)


@pytest.fixture
def _own_signal_handlers() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    processes.raise_interrupts()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_own_signal_handlers")
def test_interrupt_while_a_run_is_made_waits_until_it_can_be_ended(
    client: MlflowClient, config: RunConfig
) -> None:
    before = len(client.search_runs([experiment_id()]))

    def open_run_as_a_signal_comes() -> None:
        with processes.interrupts_put_off():
            os.kill(os.getpid(), signal.SIGTERM)
            with tracked_run(client, config, time.time()):
                pass

    with pytest.raises(Interrupted, match="SIGTERM"):
        open_run_as_a_signal_comes()
    newest, *others = client.search_runs([experiment_id()])
    assert len(others) == before
    assert newest.info.status == "KILLED"
    assert newest.data.tags["reason"] == "interrupted: SIGTERM"


def test_run_that_nobody_opened_can_be_ended(
    client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = client.create_run(experiment_id())
    monkeypatch.setenv("MLFLOW_RUN_ID", made.info.run_id)
    end_unopened_run("interrupted: SIGTERM")
    run = client.get_run(made.info.run_id)
    assert run.info.status == "KILLED"
    assert run.data.tags["reason"] == "interrupted: SIGTERM"


def test_run_of_a_dead_process_is_closed_and_named(client: MlflowClient) -> None:
    run_id = open_run(client, socket.gethostname(), dead_process())
    name = client.get_run(run_id).info.run_name
    assert close_stale_runs(client, experiment_id()) == [name]
    run = client.get_run(run_id)
    assert run.info.status == "KILLED"
    assert run.info.end_time
    assert run.data.tags["outcome"] == "failed"
    assert run.data.tags["reason"] == "the command was killed"


def test_run_of_a_killed_process_that_nobody_reaped_is_closed(client: MlflowClient) -> None:
    code = "from pipeline import processes; print(processes.identity(), flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).resolve().parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    run_id = open_run(client, socket.gethostname(), process.stdout.readline().strip())
    assert close_stale_runs(client, experiment_id()) == []
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # wait, and leave the zombie
    assert len(close_stale_runs(client, experiment_id())) == 1
    assert client.get_run(run_id).info.status == "KILLED"
    process.communicate()


def test_run_of_another_host_or_of_a_living_process_is_left_alone(client: MlflowClient) -> None:
    ids = [
        open_run(client, "another-host", dead_process()),
        open_run(client, socket.gethostname(), processes.identity()),
    ]
    assert close_stale_runs(client, experiment_id()) == []
    assert [client.get_run(run_id).info.status for run_id in ids] == ["RUNNING", "RUNNING"]
    for run_id in ids:
        client.set_terminated(run_id)


def test_server_that_does_not_answer_is_told_within_seconds() -> None:
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri("http://127.0.0.1:9")
    begun = time.monotonic()
    try:
        with pytest.raises(TrackingError, match=r"http://127\.0\.0\.1:9: the tracking server"):
            connect()
    finally:
        mlflow.set_tracking_uri(before)
    assert time.monotonic() - begun < 20


@pytest.mark.parametrize(
    "uri",
    ["sqlite:///{0}", "sqlite:///{0}/text", "sqlite:///{0}/text/mlflow.db", "nonsense://{0}"],
)
def test_store_that_cannot_be_opened_is_told_at_once_and_in_a_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, uri: str
) -> None:
    (tmp_path / "text").write_text("this is no data base\n" * 100)
    begun = time.monotonic()
    monkeypatch.setattr("mlflow.get_tracking_uri", lambda: uri.format(tmp_path))
    with pytest.raises(TrackingError) as told:
        connect()
    assert time.monotonic() - begun < 10
    assert "\n" not in str(told.value)
    assert capfd.readouterr() == ("", "")


def test_store_that_another_command_writes_to_can_be_opened(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as other:
        other.execute("BEGIN IMMEDIATE")
        with opening(f"sqlite:///{tmp_path}/mlflow.db"):
            pass


def test_patience_with_a_server_is_set_whenever_one_is_asked(
    client: MlflowClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    connect()
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "2"
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "5")
    connect()
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "5"


def test_commands_that_start_at_once_make_one_new_store(tmp_path: Path) -> None:
    environment = os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/new.db"}
    code = "from pipeline.tracking import connect; connect()"
    root = Path(__file__).resolve().parents[1]
    starts = [
        subprocess.Popen([sys.executable, "-c", code], cwd=root, env=environment) for _ in range(3)
    ]
    assert [start.wait(timeout=120) for start in starts] == [0, 0, 0]


def test_run_that_cannot_be_opened_is_a_tracking_error(
    client: MlflowClient, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)
    with (
        pytest.raises(TrackingError, match="cannot be opened"),
        tracked_run(client, config, time.time()),
    ):
        pass


def test_artifacts_that_cannot_be_stored_are_a_tracking_error(
    client: MlflowClient, config: RunConfig, tmp_path: Path
) -> None:
    (tmp_path / "record.json").write_text("{}")
    no_folder = tmp_path / "record.json" / "artifacts"
    run = client.create_run(client.create_experiment("full", artifact_location=str(no_folder)))
    tracked = TrackedRun(RunWriter(client, run), time.time())
    with pytest.raises(TrackingError, match="not everything could be logged"):
        tracked.finish(record_of(config, Outcome.COMPLETED), "note", tmp_path)
    client.set_terminated(run.info.run_id)
    # What could be logged is there.
    assert client.get_run(run.info.run_id).data.metrics["peak_memory_mib"] == 14.0


def test_curve_that_cannot_be_sent_costs_nothing_else(
    client: MlflowClient, config: RunConfig, tmp_path: Path
) -> None:
    (tmp_path / "record.json").write_text("{}")
    run = client.create_run(experiment_id())
    tracked = TrackedRun(RunWriter(client, run), time.time())
    tracked._sender.close()
    tracked._sender.error = OSError("the curve")
    with pytest.raises(TrackingError, match="the curve"):
        tracked.finish(record_of(config, Outcome.COMPLETED), "the note", tmp_path)
    client.set_terminated(run.info.run_id)
    data = client.get_run(run.info.run_id).data
    assert data.metrics["peak_memory_mib"] == 14.0
    assert data.tags["mlflow.note.content"] == "the note"
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["record.json"]
