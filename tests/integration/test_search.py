"""Searches as people start them, with real trainings of a tiny model on the CPU."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import optuna
import psutil
import pytest
import yaml
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from optuna.trial import TrialState
from transformers import TrainingArguments

from pipeline.presets import resolve

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


class Place(NamedTuple):
    """A folder with a store of its own, and what a search there is started with."""

    folder: Path
    environment: dict[str, str]
    options: list[str]

    @property
    def storage(self) -> str:
        return f"sqlite:///{self.folder}/optuna.db"

    def runs(self) -> list[Run]:
        client = MlflowClient(f"sqlite:///{self.folder}/mlflow.db")
        return list(client.search_runs(["0"], order_by=["attributes.start_time ASC"]))

    def start(self, *more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "pipeline", "search", *self.options, *more],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def search(self, *more: str) -> tuple[int, Any, str]:
        process = self.start("--json", *more)
        out, err = process.communicate(timeout=250)
        return process.returncode, json.loads(out) if out else None, err


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Place:
    folder = tmp_path_factory.mktemp("searches")
    workload = {"model": tiny_model, "seq_len": 16, "samples": 32, "max_steps": 9}
    (folder / "tiny.yaml").write_text(yaml.safe_dump({"name": "tiny", **workload}))
    (folder / "space.yaml").write_text("optimizer: [adamw_torch, galore_adamw]\n")
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    own = {"MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db", "PYTHONPATH": str(ROOT)}
    options = "--workload tiny.yaml --preset adamw --device cpu --effective_batch 2"
    return Place(folder, kept | own | {"OMP_NUM_THREADS": "1"}, options.split())


def test_search_ends_with_a_preset_that_repeats_the_winner(place: Place) -> None:
    code, found, err = place.search(
        *["--min_throughput", "0.001", "--space", "space.yaml", "--study", "whole"]
    )
    assert code == 0, err
    assert (found["confirmed"], found["complete"], found["failed"]) == (True, True, 1)
    [unsupported] = [row for row in found["rows"] if row["outcome"] == "unsupported"]
    assert "galore" in unsupported["reason"]
    [inferred] = [row for row in found["rows"] if row["role"] == "inferred"]
    assert inferred["follows_from"] == unsupported["trial"]
    parent, *children = place.runs()
    assert parent.info.status == "FINISHED"
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    numbers = [run.data.tags["trial.number"] for run in children]
    assert numbers == [str(number) for number in range(len(children))]
    assert {run.data.tags["study.name"] for run in children} == {"whole"}
    assert {row["run_id"] for row in found["rows"] if row["run_id"]} == {
        run.info.run_id for run in children
    }
    assert parent.data.metrics["best/peak_memory_mib"] == found["best"]["peak_memory_mib"]
    assert "confirmed in a fresh process" in parent.data.tags["mlflow.note.content"]
    client = MlflowClient(f"sqlite:///{place.folder}/mlflow.db")
    files = Path(client.download_artifacts(parent.info.run_id, "", str(place.folder)))
    best = resolve(str(files / "best.yaml"), "tiny", {}, look=lambda _: ())
    assert (
        f"{best.training.micro_batch}x{best.training.accumulation}"
        in (found["best"]["configuration"])
    )
    assert best.measurement.measure == "full"
    TrainingArguments(**json.loads((files / "training_arguments.json").read_text()))
    assert (files / "trials.csv").read_text().count("\n") == len(found["rows"]) + 1
    assert (files / "search.png").stat().st_size > 10_000
    assert "plotly" in (files / "search.html").read_text()


def test_changed_space_under_the_same_name_is_refused_before_any_training(place: Place) -> None:
    study = ["--min_throughput", "0.001", "--study", "changed", "--trials", "1"]
    assert place.search(*study)[0] == 0
    runs = len(place.runs())
    code, _, err = place.search(*study, "--micro_batches", "1")
    assert code == 2
    assert "use another study name" in err
    assert "1x2, 2x1 there and 1x2 here" in err
    assert len(place.runs()) == runs


def test_worker_that_is_killed_is_a_row_and_interrupting_ends_in_order(place: Place) -> None:
    process = place.start(
        *["--min_throughput", "0.001", "--study", "killed", "--effective_batch", "8"]
    )
    command = psutil.Process(process.pid)
    try:
        os.kill(_worker(command), signal.SIGKILL)
        first = optuna_trials(place, "killed", TrialState.COMPLETE)
        assert json.loads(first[0].user_attrs["measured"])["outcome"] == "failed"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "crashed" in err
    assert "left to try" in err
    assert optuna_trials(place, "killed", TrialState.RUNNING, wait=False) == []
    assert {run.info.status for run in place.runs()} <= {"FINISHED", "FAILED", "KILLED"}


def _worker(command: psutil.Process) -> int:
    """Return the process that trains, once it does."""
    for _ in range(600):
        for process in command.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                children = process.children()
                if any("pipeline.worker.watch" in child.cmdline() for child in children):
                    return process.pid
        time.sleep(0.1)
    raise AssertionError("no worker came")


def optuna_trials(
    place: Place, name: str, state: TrialState, *, wait: bool = True
) -> list[optuna.trial.FrozenTrial]:
    """Return the study's trials in this state, once there are any."""
    for _ in range(600 if wait else 1):
        study = optuna.load_study(study_name=name, storage=place.storage)
        if found := study.get_trials(states=(state,)):
            return found
        time.sleep(0.1)
    return []


def test_storage_that_cannot_be_used_is_one_line(place: Place) -> None:
    code, found, err = place.search("--storage", "nowhere")
    assert (code, found) == (2, None)
    assert "storage=nowhere: cannot be used" in err
