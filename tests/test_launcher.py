"""The launcher with a real fork server; small fakes stand in for the training."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

from pipeline.config import RunConfig
from pipeline.errors import Interrupted
from pipeline.launcher import Launched, Launcher, worker_environment
from pipeline.presets import resolve
from pipeline.record import (
    Event,
    Finished,
    MemorySample,
    Outcome,
    Samples,
    StepMark,
    Steps,
    Warned,
)
from pipeline.worker import entry, start

ROOT = Path(__file__).resolve().parents[1]
DIRTY = {
    "MLFLOW_RUN_ID": "abc",
    "MLFLOW_TRACKING_URI": "sqlite:///elsewhere.db",
    "ACCELERATE_MIXED_PRECISION": "fp16",
    "PYTORCH_ALLOC_CONF": "backend:native",
    "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    "NVIDIA_TF32_OVERRIDE": "1",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",
    "CUDA_LAUNCH_BLOCKING": "1",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}
KEPT = {
    "OF_THE_USER": "kept",
    "RANKS_OF_THE_USER": "kept",
}
Environment = Mapping[str, str]


def rows(begin: int, end: int) -> Samples:
    return Samples(rows=tuple(MemorySample(i / 100, i * 1024) for i in range(begin, end)))


def step(number: int) -> Steps:
    return Steps(rows=(StepMark(number, number - 0.5, float(number), 4),))


# Fakes of `start.worker`. They run in a child of the fork server.


def completes(
    text: str, environment: Environment, connection: Connection, log: str, at: float
) -> None:
    connection.send([rows(0, 3), step(1)])
    connection.send([rows(3, 5), Finished(outcome=Outcome.COMPLETED, metrics={"train_loss": 0.5})])


def raises_out_of_memory(
    text: str, environment: Environment, connection: Connection, log: str, at: float
) -> None:
    error = RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")
    connection.send([rows(0, 3), entry._failure(error)])


def exits_as_bitsandbytes_does(
    text: str, environment: Environment, connection: Connection, log: str, at: float
) -> None:
    connection.send([rows(0, 4)])
    Path(log).write_text(
        "loading\nError out of memory at line 380 in file /src/csrc/pythonInt.cpp\n"
    )
    sys.exit(1)


def exits_plainly(
    text: str, environment: Environment, connection: Connection, log: str, at: float
) -> None:
    Path(log).write_text("no such kernel\n")
    sys.exit(1)


def is_killed_after_telling_of_memory(
    text: str, environment: Environment, connection: Connection, log: str, at: float
) -> None:
    Path(log).write_text("hint: the last run went out of memory\n")
    os.kill(os.getpid(), signal.SIGSEGV)


def is_killed(
    text: str, environment: Environment, connection: Connection, log: str, at: float
) -> None:
    for number in range(1, 6):
        connection.send([rows(10 * (number - 1), 10 * number), step(number)])
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(text: str, environment: Environment, connection: Connection, log: str, at: float) -> None:
    connection.send([rows(0, 3), step(1)])
    while True:  # as a training does that waits for a lock: the memory thread goes on
        connection.send([rows(3, 4)])
        time.sleep(0.05)


def steps_for_ever(
    text: str, environment: Environment, connection: Connection, log: str, at: float
) -> None:
    number = 0
    while True:
        number += 1
        connection.send([step(number)])
        time.sleep(0.05)


def ignores_sigterm_after_finishing(
    text: str, environment: Environment, connection: Connection, log: str, at: float
) -> None:
    connection.send([Warned(message=f"{os.getpid()}")])
    connection.send([Finished(outcome=Outcome.FAILED, message="ValueError: no")])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Event().wait()


def tells_environment(
    text: str, environment: Environment, connection: Connection, log: str, at: float
) -> None:
    os.environ.update(environment)
    connection.send([Warned(message=json.dumps(dict(os.environ)))])
    connection.send([Finished(outcome=Outcome.COMPLETED)])


def tells_its_number_and_waits(
    text: str, environment: Environment, connection: Connection, log: str, at: float
) -> NoReturn:
    start._die_with_parent()
    Path(os.environ["NUMBER_FILE"]).write_text(f"{os.getpid()} {os.getppid()}\n")
    connection.send([step(1)])
    while True:
        time.sleep(1)


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    """One fork server for all: it takes seconds to import torch."""
    with pytest.MonkeyPatch.context() as patch:
        for key, value in (DIRTY | KEPT).items():
            patch.setenv(key, value)
        with Launcher() as launcher:
            launcher.warm()
            yield


@pytest.fixture
def launch(config: RunConfig) -> Callable[..., Launched]:
    def launched(
        fake: Callable[..., Any],
        on_event: Callable[[Event], None] = lambda event: None,
        **limits: Any,
    ) -> Launched:
        own = with_settings(config, "measurement", **limits)
        return Launcher(start_worker=fake).launch(own, on_event)

    return launched


def with_settings(config: RunConfig, group: str, **values: Any) -> RunConfig:
    changed = getattr(config, group).model_copy(update=values)
    return config.model_copy(update={group: changed})


def gone_within(numbers: list[int], seconds: float) -> bool:
    """Whether these processes end in time; a zombie that nobody reaped has ended."""

    def lives(number: int) -> bool:
        try:
            return bool(psutil.Process(number).status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    deadline = time.monotonic() + seconds
    while any(map(lives, numbers)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_completed_training_gives_a_record_with_all_events(
    launch: Callable[..., Launched],
) -> None:
    seen: list[Event] = []
    record, recorder, _ = launch(completes, seen.append)
    assert record.outcome is Outcome.COMPLETED
    assert record.metrics["train_loss"] == 0.5
    assert len(recorder.samples) == 5
    assert [type(event) for event in seen] == [Samples, Steps, Samples, Finished]
    assert not record.interrupted


def test_out_of_memory_is_recognised_in_the_text_of_the_exception(
    launch: Callable[..., Launched],
) -> None:
    record, recorder, _ = launch(raises_out_of_memory)
    assert record.outcome is Outcome.OUT_OF_MEMORY
    assert record.message == "CUDA error: out of memory"
    assert len(recorder.samples) == 3


def test_out_of_memory_is_recognised_in_the_log_of_a_worker_that_exits(
    launch: Callable[..., Launched],
) -> None:
    record, recorder, log = launch(exits_as_bitsandbytes_does)
    assert record.outcome is Outcome.OUT_OF_MEMORY
    assert record.message.startswith("Error out of memory at line 380")
    assert len(recorder.samples) == 4
    assert "loading" in log


def test_signal_counts_for_more_than_words_in_the_log(launch: Callable[..., Launched]) -> None:
    record = launch(is_killed_after_telling_of_memory).record
    assert record.outcome is Outcome.FAILED
    assert "SIGSEGV" in record.message


def test_exit_code_1_is_a_failure_with_the_end_of_the_log(launch: Callable[..., Launched]) -> None:
    record = launch(exits_plainly).record
    assert record.outcome is Outcome.FAILED
    assert "exit code 1" in record.message
    assert "no such kernel" in record.message


def test_killed_worker_leaves_a_failed_record_with_its_samples(
    launch: Callable[..., Launched],
) -> None:
    record, recorder, _ = launch(is_killed)
    assert record.outcome is Outcome.FAILED
    assert "SIGKILL" in record.message
    assert len(recorder.samples) == 50
    assert record.steps == 5
    assert record.metrics["peak_memory_mib"] == pytest.approx(49 / 1024)


def test_worker_without_a_step_is_ended_after_stall_timeout(
    launch: Callable[..., Launched],
) -> None:
    record, recorder, _ = launch(hangs, stall_timeout=0.6)
    assert record.outcome is Outcome.TIMEOUT
    assert "stall_timeout=0.6" in record.message
    assert len(recorder.samples) > 3
    assert record.steps == 1


def test_worker_that_goes_on_is_ended_after_timeout(launch: Callable[..., Launched]) -> None:
    record = launch(steps_for_ever, stall_timeout=30.0, timeout=0.8).record
    assert record.outcome is Outcome.TIMEOUT
    assert "timeout=0.8" in record.message
    assert record.steps > 3


def test_worker_that_does_not_end_after_its_last_word_is_ended(
    launch: Callable[..., Launched],
) -> None:
    record = launch(ignores_sigterm_after_finishing).record
    assert record.outcome is Outcome.FAILED
    assert record.message == "ValueError: no"
    assert gone_within([int(record.warnings[0])], 0)


def test_interrupt_ends_the_worker_and_keeps_its_samples(launch: Callable[..., Launched]) -> None:
    def interrupt_at_step_3(event: Event) -> None:
        if isinstance(event, Steps) and event.rows[0].step == 3:
            raise Interrupted("SIGTERM")

    record = launch(steps_for_ever, interrupt_at_step_3).record
    assert record.interrupted
    assert record.outcome is Outcome.FAILED
    assert record.message == "interrupted: SIGTERM"
    assert record.steps >= 3


def test_worker_sees_the_environment_of_the_user_less_what_would_change_the_training(
    config: RunConfig, launch: Callable[..., Launched]
) -> None:
    own = with_settings(config, "training", alloc_conf="expandable_segments:True")
    launched = Launcher(start_worker=tells_environment).launch(own, lambda event: None)
    found = json.loads(launched.record.warnings[0])
    assert {key: found.get(key) for key in KEPT} == KEPT
    assert found["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert set(DIRTY) & set(found) == {"PYTORCH_ALLOC_CONF"}
    assert [key for key in found if key.startswith(("MLFLOW_", "ACCELERATE_"))] == []


def test_without_alloc_conf_the_worker_has_no_allocator_settings(
    launch: Callable[..., Launched],
) -> None:
    found = json.loads(launch(tells_environment).record.warnings[0])
    assert [key for key in found if key.endswith("ALLOC_CONF")] == []


def test_own_environment_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "mine")
    before = dict(os.environ)
    with Launcher():
        assert dict(os.environ) == before


def test_fp8_asks_accelerate_for_it(config: RunConfig) -> None:
    own = with_settings(config, "training", precision="fp8")
    assert worker_environment(own)["ACCELERATE_MIXED_PRECISION"] == "fp8"


@pytest.mark.parametrize(
    ("visible", "device", "expected"),
    [
        (None, "cuda", "0"),
        (None, "cuda:1", "1"),
        ("2,3", "cuda", "2"),
        ("2, 3", "cuda:1", "3"),
        ("GPU-aaa,GPU-bbb", "cuda:1", "GPU-bbb"),
        ("GPU-aaa", "cuda", "GPU-aaa"),
        # What the user hid stays hidden; the worker then says that it finds no GPU.
        ("", "cuda", ""),
        ("5", "cuda:1", ""),
        ("0,-1,2", "cuda:2", ""),
    ],
)
def test_worker_sees_one_gpu_of_those_that_the_user_shows(
    config: RunConfig,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    device: str,
    expected: str,
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    own = with_settings(config, "measurement", device=device)
    assert worker_environment(own)["CUDA_VISIBLE_DEVICES"] == expected


def test_worker_on_the_cpu_keeps_the_users_gpus(config: RunConfig) -> None:
    own = with_settings(config, "measurement", device="cpu")
    assert "CUDA_VISIBLE_DEVICES" not in worker_environment(own)


def test_data_loader_may_have_workers_of_its_own(tiny_model: str) -> None:
    settings = {"device": "cpu", "model": tiny_model, "seq_len": 8, "samples": 8}
    workers = {"training_arguments": '{"dataloader_num_workers": 1}'}
    # A server of its own: an earlier test may have ended the shared one.
    with Launcher() as launcher:
        config = resolve("adamw", "laptop", settings | workers)
        record = launcher.launch(config, lambda event: None).record
    assert record.outcome is Outcome.COMPLETED, record.message
    assert record.steps > 0


def test_worker_that_was_not_killed_does_not_keep_the_command_alive(tmp_path: Path) -> None:
    script = (
        "from multiprocessing.context import ForkServerProcess\n"
        "from pipeline.errors import Interrupted\n"
        "from pipeline.launcher import Launcher\n"
        "from pipeline.presets import resolve\n"
        "from tests.test_launcher import tells_its_number_and_waits\n"
        "def interrupted(*args):\n"
        "    raise Interrupted('SIGTERM')\n"
        "ForkServerProcess.kill = interrupted\n"
        "config = resolve('adamw', 'laptop', {'device': 'cpu'})\n"
        "with Launcher(start_worker=tells_its_number_and_waits) as launcher:\n"
        "    launcher.launch(config, interrupted)\n"
    )
    file = tmp_path / "number"
    environment = os.environ | {"NUMBER_FILE": str(file), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, cwd=ROOT, env=environment, timeout=60, capture_output=True)
    assert b"Interrupted: SIGTERM" in ended.stderr
    assert gone_within([int(file.read_text().split()[0])], 10)


def test_worker_dies_with_a_killed_command(tmp_path: Path) -> None:
    script = (
        "from pipeline.launcher import Launcher\n"
        "from pipeline.presets import resolve\n"
        "from tests.test_launcher import tells_its_number_and_waits\n"
        "config = resolve('adamw', 'laptop', {'device': 'cpu'})\n"
        "with Launcher(start_worker=tells_its_number_and_waits) as launcher:\n"
        "    launcher.launch(config, lambda event: None)\n"
    )
    file = tmp_path / "number"
    environment = os.environ | {"NUMBER_FILE": str(file), "PYTHONPATH": str(ROOT)}
    command = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=environment)
    try:
        deadline = time.monotonic() + 60
        while not (file.exists() and file.read_text().endswith("\n")):
            assert command.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        worker, fork_server = map(int, file.read_text().split())
    finally:
        command.kill()
        command.wait()
    assert gone_within([worker, fork_server], 10)
