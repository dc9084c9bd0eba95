"""The callback in a real Trainer, on the CPU."""

import gc
import math
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
from mlflow.tracking import MlflowClient
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from pipeline import MemoryCallback
from pipeline.config import Measurement
from pipeline.record import Built, Event, Logged, Proven, Steps

ROOT = Path(__file__).resolve().parents[2]


def model() -> BertForSequenceClassification:
    return BertForSequenceClassification(
        BertConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            vocab_size=200,
            max_position_embeddings=32,
        )
    )


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self.count:
            raise IndexError
        return {"input_ids": torch.arange(8) + 100, "labels": index % 2}


class Slow(TrainerCallback):
    """Makes every step take the same, and long enough to be a measurement."""

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.03)


class Fails(TrainerCallback):
    """Raises in the middle of the training, as a training does that runs out of memory."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise RuntimeError("out of memory")


def trainer(folder: Path, *callbacks: TrainerCallback, rows: int = 24, **arguments: Any) -> Trainer:
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "logging_steps": 2,
        "logging_nan_inf_filter": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return Trainer(
        model=arguments.pop("model", None) or model(),
        args=TrainingArguments(**(values | arguments)),
        train_dataset=Rows(rows),
        callbacks=list(callbacks),
    )


def events(folder: Path, **arguments: Any) -> list[Event]:
    seen: list[Event] = []
    trainer(folder, MemoryCallback(seen.append), **arguments).train()
    return seen


def threads() -> list[str]:
    """Return the threads that a measurement of this process has going."""
    ours = ("memory-monitor", "curve-sender")
    return [thread.name for thread in threading.enumerate() if thread.name in ours]


def in_short(event: Event) -> str:
    match event:
        case Steps(rows=rows):
            return " ".join(f"step {mark.step}: {mark.samples} samples" for mark in rows)
        case Logged(step=step, values=values):
            return f"logged {step}: {' '.join(sorted(values))}"
    return type(event).__name__


LOGGED = "grad_norm learning_rate loss"


@pytest.mark.parametrize(("accumulation", "samples"), [(1, 2), (3, 6)])
def test_events_come_in_the_order_of_the_training(
    tmp_path: Path, accumulation: int, samples: int
) -> None:
    seen = events(tmp_path, gradient_accumulation_steps=accumulation)
    assert [in_short(event) for event in seen] == [
        "Built",
        "Proven",
        f"step 1: {samples} samples",
        "Composed",
        f"step 2: {samples} samples",
        f"logged 2: {LOGGED}",
        f"step 3: {samples} samples",
        f"step 4: {samples} samples",
        f"logged 4: {LOGGED}",
    ]


def test_last_step_of_an_epoch_counts_the_samples_that_are_left(tmp_path: Path) -> None:
    arguments = {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 3}
    seen = events(tmp_path, rows=9, **arguments)
    counts = [mark.samples for event in seen if isinstance(event, Steps) for mark in event.rows]
    assert counts == [6, 3, 6, 3]


def test_times_of_steps_follow_each_other(tmp_path: Path) -> None:
    seen = events(tmp_path)
    marks = [mark for event in seen if isinstance(event, Steps) for mark in event.rows]
    times = [moment for mark in marks for moment in (mark.begun, mark.ended)]
    assert times == sorted(times)
    assert times[0] > 0


def test_built_and_proven_tell_what_was_built(tmp_path: Path) -> None:
    seen = events(tmp_path, gradient_accumulation_steps=3, optim="adafactor")
    built = next(event for event in seen if isinstance(event, Built))
    proven = next(event for event in seen if isinstance(event, Proven))
    assert (built.total_steps, built.asked_batch) == (4, 6)
    assert built.arguments["optim"] == "adafactor"
    assert (proven.effective.micro_batch, proven.effective.accumulation) == (2, 3)
    assert "Adafactor" in proven.effective.optimizer


class NoLinear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(200, 2)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.embedding(input_ids).mean(1)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_model_without_a_linear_layer_trains(tmp_path: Path) -> None:
    seen: list[Event] = []
    trained = trainer(tmp_path, MemoryCallback(seen.append), bf16=True, model=NoLinear())
    trained.train()
    (proven,) = (event for event in seen if isinstance(event, Proven))
    assert proven.effective.autocast_dtype == "bfloat16"


@pytest.mark.parametrize(("bf16", "dtype"), [(True, "bfloat16"), (False, None)])
def test_autocast_of_a_compiled_model_is_read_back(
    tmp_path: Path, bf16: bool, dtype: str | None
) -> None:
    seen = events(tmp_path, bf16=bf16, torch_compile=True, torch_compile_backend="eager")
    (proven,) = (event for event in seen if isinstance(event, Proven))
    assert (proven.effective.autocast_dtype, proven.effective.compiled) == (dtype, True)


def test_adaptive_measurement_ends_once_the_throughput_is_known(tmp_path: Path) -> None:
    seen: list[Event] = []
    callback = MemoryCallback(seen.append, measurement=Measurement(measure="adaptive"))
    trained = trainer(tmp_path, Slow(), callback, max_steps=5000)
    trained.train()
    assert 10 <= trained.state.global_step < 2500


def test_full_measurement_does_not_end_early(tmp_path: Path) -> None:
    callback = MemoryCallback(lambda event: None, measurement=Measurement(measure="full"))
    trained = trainer(tmp_path, Slow(), callback, max_steps=60)
    trained.train()
    assert trained.state.global_step == 60


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    uri = f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(uri)
    mlflow.set_experiment("scripts")
    yield uri
    mlflow.set_tracking_uri(before)


def points(run_id: str, key: str) -> list[tuple[int, float]]:
    return [(p.step, p.value) for p in MlflowClient().get_metric_history(run_id, key)]


@pytest.mark.usefixtures("store")
def test_somebodys_own_script_logs_to_the_active_run(tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        trainer(tmp_path, MemoryCallback(), max_steps=6).train()
        active = mlflow.active_run()
        assert active
        assert active.info.run_id == run.info.run_id  # it is the script's to end
    assert threads() == []
    found = MlflowClient().get_run(run.info.run_id)
    assert found.info.status == "FINISHED"
    assert found.data.metrics["peak_memory_mib"] >= 0
    assert found.data.params["training.micro_batch"] == "2"
    assert found.data.tags["memory.source"] == "process_uss"
    assert [step for step, _ in points(run.info.run_id, "step/time_ms")] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in points(run.info.run_id, "step/loss")] == [2, 4, 6]
    assert len(points(run.info.run_id, "memory/process_mib")) > 0


def example() -> str:
    """Return the README's lines about one's own script."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    [block] = [block for block in blocks if "MemoryCallback() as memory" in block]
    return str(block)


@pytest.mark.usefixtures("store")
def test_example_of_the_readme_logs_to_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(example(), {"model": model(), "dataset": Rows(24)})
    assert mlflow.active_run() is None
    run = mlflow.last_active_run()
    assert run
    assert run.info.status == "FINISHED"
    assert run.data.tags["outcome"] == "completed"
    assert run.data.params["training.micro_batch"] == "8"
    assert {"peak_memory_mib", "step/time_ms", "memory/process_mib"} <= set(run.data.metrics)
    assert len(points(run.info.run_id, "step/time_ms")) == 9  # three epochs of three steps
    assert threads() == []


@pytest.mark.usefixtures("store")
def test_library_callback_and_ours_share_a_run_without_a_double_point(tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        trainer(tmp_path, MemoryCallback(), report_to="mlflow").train()
    keys = MlflowClient().get_run(run.info.run_id).data.metrics
    ours = {key for key in keys if key.startswith("step/")}
    assert "step/loss" in ours
    for key in {"loss", "grad_norm", "learning_rate"} | ours:
        counts = Counter(step for step, _ in points(run.info.run_id, key))
        assert set(counts.values()) == {1}, key
    assert all(math.isfinite(value) for value in keys.values())


@pytest.mark.usefixtures("store")
def test_second_training_with_the_same_callback_has_figures_of_its_own(tmp_path: Path) -> None:
    callback = MemoryCallback()
    for steps in (12, 2):
        trainer(tmp_path, callback, max_steps=steps).train()
    runs = MlflowClient().search_runs(
        [mlflow.get_experiment_by_name("scripts").experiment_id],  # type: ignore[union-attr]
        max_results=2,
    )
    counts = [len(points(run.info.run_id, "step/time_ms")) for run in runs]
    assert counts == [2, 12]
    assert [run.info.status for run in runs] == ["FINISHED", "FINISHED"]
    assert "samples_per_second" in runs[1].data.metrics
    assert "samples_per_second" not in runs[0].data.metrics  # all of it is warm-up


@pytest.mark.usefixtures("store")
def test_training_that_raises_in_a_with_leaves_no_thread(tmp_path: Path) -> None:
    with mlflow.start_run() as run:
        with pytest.raises(RuntimeError, match="out of memory"), MemoryCallback() as memory:
            trainer(tmp_path, memory, Fails()).train()
        assert threads() == []
    assert [step for step, _ in points(run.info.run_id, "step/time_ms")] == [1, 2, 3]


@pytest.mark.usefixtures("store")
def test_run_that_the_callback_opened_is_failed_if_the_training_raises(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), MemoryCallback() as memory:
        trainer(tmp_path, memory, Fails()).train()
    assert mlflow.active_run() is None
    assert mlflow.last_active_run().info.status == "FAILED"  # type: ignore[union-attr]


@pytest.mark.usefixtures("store")
def test_training_that_raises_without_a_with_is_watched_no_longer_than_it_is_there(
    tmp_path: Path,
) -> None:
    def train() -> None:
        with pytest.raises(RuntimeError):
            trainer(tmp_path, MemoryCallback(), Fails()).train()

    with mlflow.start_run():
        train()
        gc.collect()
        for thread in threading.enumerate():
            if thread.name == "memory-monitor":
                thread.join(5)
    assert "memory-monitor" not in threads()


def test_script_that_crashes_leaves_a_failed_run(store: str, tmp_path: Path) -> None:
    script = f"""
import sys, mlflow
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_callback import Fails, MemoryCallback, trainer
mlflow.set_tracking_uri({store!r})
mlflow.set_experiment("crashes")
trainer(Path({str(tmp_path)!r}), MemoryCallback(), Fails()).train()
"""
    crashed = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert "RuntimeError: out of memory" in crashed.stderr
    experiment = mlflow.get_experiment_by_name("crashes")
    assert experiment
    (run,) = MlflowClient().search_runs([experiment.experiment_id])
    assert run.info.status == "FAILED"
    assert run.info.end_time
