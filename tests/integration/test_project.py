"""The project as people use it: `mlflow run .` and `python -m pipeline`, on the CPU, end to end."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlflow
import psutil
import pyarrow.parquet
import pytest
import yaml
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from transformers import TrainingArguments

from pipeline.cli import main

ROOT = Path(__file__).resolve().parents[2]
WITHIN_SECONDS = 120
LONG_STEPS = 20_000  # minutes, and a point of the curves every 40 steps


class Place(NamedTuple):
    """A tracking store, a workload of two small layers, and a folder to be in."""

    folder: Path
    uri: str
    experiment: str
    workload: str
    environment: Mapping[str, str]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("a place")
    uri = f"sqlite:///{folder}/mlflow.db"
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(uri)
    experiment = mlflow.create_experiment("tests", artifact_location=str(folder / "artifacts"))
    mlflow.set_experiment(experiment_id=experiment)
    workload = folder / "tiny.yaml"
    values = {"name": "tiny", "model": tiny_model, "seq_len": 32, "samples": 64, "max_steps": 12}
    workload.write_text(yaml.safe_dump(values))
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    own = {"MLFLOW_TRACKING_URI": uri, "MLFLOW_EXPERIMENT_ID": experiment, "PATH": path}
    # One thread each: tests start several trainings at once.
    environment = kept | own | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    yield Place(folder, uri, experiment, str(workload), environment)
    mlflow.set_tracking_uri(before)


def by_mlflow(place: Place, **settings: Any) -> list[str]:
    """Return the command line of `mlflow run`."""
    options = [word for key, value in settings.items() for word in ("-P", f"{key}={value}")]
    start = [sys.executable, "-m", "mlflow", "run", str(ROOT), "--env-manager", "local"]
    return [
        *start,
        "--experiment-id",
        place.experiment,
        "-P",
        f"workload={place.workload}",
        *options,
    ]


def directly(place: Place, **settings: Any) -> list[str]:
    """Return the command line of `python -m pipeline run`."""
    return [sys.executable, "-m", "pipeline", "run", *options_of(place, settings)]


def options_of(place: Place, settings: Mapping[str, Any]) -> list[str]:
    values = {"workload": place.workload, **settings}
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]


def newest(place: Place) -> Run:
    return MlflowClient(place.uri).search_runs([place.experiment], max_results=1)[0]


def run_of(place: Place, seed: int) -> Run | None:
    """Return the run of the command that was given this seed; tests use each once."""
    wanted = f"params.`workload.seed` = '{seed}'"
    found = MlflowClient(place.uri).search_runs([place.experiment], wanted)
    return found[0] if found else None


def wait_for(look: Callable[[], Run | None], what: str) -> Run:
    deadline = time.monotonic() + WITHIN_SECONDS
    while not (found := look()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return found


class Answer(NamedTuple):
    """What a command in this process gave back."""

    code: int
    out: str
    err: str


@pytest.fixture
def command(
    place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Answer]]:
    """Run the command line in this process; the training has one of its own all the same."""
    monkeypatch.chdir(place.folder)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}

    def run(*flags: str, **settings: Any) -> Answer:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(["run", *flags, *options_of(place, settings)])
        return Answer(int(end.value.code or 0), *capsys.readouterr())

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def completed(place: Place) -> Run:
    """One `mlflow run`, with values written as people write them."""
    words = by_mlflow(
        place,
        preset="checkpointing",
        learning_rate="5e-5",
        micro_batch="04",
        gradient_checkpointing="true",
        max_steps="12.0",
        alloc_conf="",
    )
    done = subprocess.run(
        words, cwd=place.folder, env=place.environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return newest(place)


@pytest.fixture(scope="module")
def artifacts(place: Place, completed: Run) -> Path:
    client = MlflowClient(place.uri)
    return Path(client.download_artifacts(completed.info.run_id, "", str(place.folder)))


def test_run_is_finished_and_measured(completed: Run) -> None:
    assert completed.info.status == "FINISHED"
    assert completed.data.tags["outcome"] == "completed"
    assert completed.data.metrics["samples_per_second"] > 0
    assert completed.data.metrics["peak_memory_mib"] > 0
    assert "peak_allocated_mib" not in completed.data.metrics  # no GPU: absent, not 0


def test_same_number_written_two_ways_stands_under_two_names(completed: Run) -> None:
    params = completed.data.params
    assert (params["learning_rate"], params["training.learning_rate"]) == ("5e-5", "5e-05")
    assert (params["micro_batch"], params["training.micro_batch"]) == ("04", "4")
    assert (params["max_steps"], params["workload.max_steps"]) == ("12.0", "12")
    assert params["training.gradient_checkpointing"] == "true"
    assert params["training.alloc_conf"] == "none"


def test_every_step_has_one_point_per_metric(place: Place, completed: Run) -> None:
    client = MlflowClient(place.uri)
    for key in ("step/time_ms", "step/samples_per_second"):
        points = client.get_metric_history(completed.info.run_id, key)
        assert [point.step for point in points] == list(range(1, 13)), key
    assert "loss" not in completed.data.metrics  # nobody else logs to this run


def test_all_files_are_there(artifacts: Path) -> None:
    expected = {
        "config.yaml",
        "record.json",
        "memory.parquet",
        "memory.png",
        "training_arguments.json",
        "worker.log",
    }
    assert expected <= {path.name for path in artifacts.iterdir()}
    assert (artifacts / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_record_and_curve_agree_with_the_run(artifacts: Path, completed: Run) -> None:
    record = json.loads((artifacts / "record.json").read_text())
    assert record["outcome"] == "completed"
    assert record["metrics"]["peak_memory_mib"] == completed.data.metrics["peak_memory_mib"]
    curve = pyarrow.parquet.read_table(artifacts / "memory.parquet").to_pydict()
    assert max(curve["process_mib"]) == completed.data.metrics["peak_memory_mib"]
    assert curve["seconds"] == sorted(curve["seconds"])


def test_training_arguments_load_into_transformers(artifacts: Path, tmp_path: Path) -> None:
    values = json.loads((artifacts / "training_arguments.json").read_text())
    loaded = TrainingArguments(**(values | {"output_dir": str(tmp_path)}))
    assert loaded.per_device_train_batch_size == 4
    assert loaded.gradient_accumulation_steps == 4
    assert loaded.max_steps == 12


def test_config_fed_back_repeats_the_run(artifacts: Path, command: Callable[..., Answer]) -> None:
    code, out, _ = command("--json", preset=artifacts / "config.yaml")
    assert code == 0
    again = json.loads(out)  # one document, and nothing else
    record = json.loads((artifacts / "record.json").read_text())
    assert again["config"] == record["config"]
    assert again["metrics"]["train_loss"] == record["metrics"]["train_loss"]


@pytest.mark.parametrize("preset", ["fp16", "tf32", "fp8"])
def test_precision_that_the_cpu_lacks_is_unsupported(
    place: Place, command: Callable[..., Answer], preset: str
) -> None:
    code, out, err = command("--json", preset=preset, device="cpu")
    assert code == 3
    assert json.loads(out)["outcome"] == "unsupported"
    assert f"precision={preset} needs a CUDA GPU" in err.replace("\n", " ")
    assert "Traceback" not in err
    run = newest(place)
    assert run.info.status == "FAILED"
    assert run.data.tags["outcome"] == "unsupported"
    assert "precision can be fp32, bf16, pure_bf16" in run.data.tags["reason"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"micro_batch": "0", "precison": "bf16"}, ("micro_batch='0'", "precison")),
        ({"preset": "fp16+bf16"}, ("contradict",)),
        ({"data": "missing.csv", "micro_batch": "-1"}, ("No such file", "micro_batch='-1'")),
    ],
)
def test_bad_input_is_refused_at_once_and_nothing_is_created(
    place: Place, tmp_path: Path, settings: dict[str, str], words: tuple[str, ...]
) -> None:
    environment = dict(place.environment) | {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/new.db"}
    begun = time.monotonic()
    refused = subprocess.run(
        [*directly(place, **settings), "--json"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    seconds = time.monotonic() - begun
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert "Traceback" not in refused.stderr
    for word in words:
        assert word in refused.stderr
    assert list(tmp_path.iterdir()) == []
    assert seconds < 6  # 1 s on a machine that has nothing else to do


class Stopped(NamedTuple):
    """A command that was sent a signal in the middle of its training."""

    code: int
    left: list[psutil.Process]
    run: Run


# Seed, how it is started, the signal, and who gets it.
STOPPED = {
    "INT to mlflow run": (101, by_mlflow, signal.SIGINT, "command"),
    "TERM to mlflow run": (102, by_mlflow, signal.SIGTERM, "command"),
    "KILL to mlflow run": (103, by_mlflow, signal.SIGKILL, "command"),
    "INT to the command": (104, directly, signal.SIGINT, "command"),
    "TERM to the command": (105, directly, signal.SIGTERM, "command"),
    "KILL to the training": (107, directly, signal.SIGKILL, "training"),
    "KILL to the command": (108, directly, signal.SIGKILL, "command"),
}


@pytest.fixture(scope="module")
def stopped(place: Place) -> Iterator[dict[str, Stopped]]:
    """Start them all at once, on one sqlite file; stop each once its training is on its way."""
    commands = {}
    for name, (seed, words, _, _) in STOPPED.items():
        commands[name] = subprocess.Popen(
            words(place, seed=seed, max_steps=LONG_STEPS),
            cwd=place.folder,
            env=place.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        yield {name: stop(place, name, commands[name]) for name in STOPPED}
    finally:
        for process in commands.values():
            if process.poll() is None:
                process.kill()
            process.wait()


def stop(place: Place, name: str, process: subprocess.Popen[bytes]) -> Stopped:
    seed, _, number, target = STOPPED[name]

    def on_its_way() -> Run | None:
        assert process.poll() is None, f"{name}: ended with {process.returncode}"
        run = run_of(place, seed)
        return run if run and "step/time_ms" in run.data.metrics else None

    run = wait_for(on_its_way, f"{name}: no step was logged")
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    (watcher,) = [p for p in tree if "pipeline.worker.watch" in " ".join(p.cmdline())]
    training = psutil.Process(watcher.ppid())
    os.kill(training.pid if target == "training" else process.pid, number)
    code = process.wait(timeout=30)
    deadline = time.monotonic() + 20
    while (left := [p for p in tree if lives(p)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for straggler in left:
        straggler.kill()
    return Stopped(code, left, MlflowClient(place.uri).get_run(run.info.run_id))


def lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("name", STOPPED)
def test_stopped_command_leaves_no_process(stopped: dict[str, Stopped], name: str) -> None:
    assert stopped[name].left == []


@pytest.mark.parametrize("name", [name for name in STOPPED if name != "KILL to the command"])
def test_stopped_run_says_so_and_keeps_what_was_measured(
    place: Place, stopped: dict[str, Stopped], name: str
) -> None:
    run = stopped[name].run
    assert run.info.status in ("KILLED", "FAILED")
    assert run.info.end_time
    assert run.data.tags["outcome"] == "failed"
    assert run.data.tags["partial"] == "true"
    expected = "SIGKILL" if name == "KILL to the training" else "interrupted: SIG"
    assert expected in run.data.tags["reason"]
    assert run.data.metrics["peak_memory_mib"] > 0
    files = {file.path for file in MlflowClient(place.uri).list_artifacts(run.info.run_id)}
    assert {"record.json", "memory.parquet"} <= files


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("INT to the command", 130),
        ("TERM to the command", 130),
        ("KILL to the training", 3),
    ],
)
def test_exit_code_tells_how_it_ended(stopped: dict[str, Stopped], name: str, code: int) -> None:
    assert stopped[name].code == code


def test_interrupted_command_leaves_a_killed_run(stopped: dict[str, Stopped]) -> None:
    assert stopped["TERM to the command"].run.info.status == "KILLED"
    assert stopped["KILL to the training"].run.info.status == "FAILED"


def test_next_start_closes_the_run_of_a_killed_command_and_a_diverged_one_is_marked(
    place: Place, stopped: dict[str, Stopped], command: Callable[..., Answer]
) -> None:
    killed = stopped["KILL to the command"].run
    assert killed.info.status == "RUNNING"
    code, out, err = command("--json", learning_rate="1e6", max_steps=20, seed=109)
    client = MlflowClient(place.uri)
    assert killed.info.run_name in err
    closed = client.get_run(killed.info.run_id)
    assert closed.info.status == "KILLED"
    assert closed.data.tags["reason"] == "the command was killed"

    assert code == 0
    assert json.loads(out)["diverged"]
    diverged = newest(place)
    assert diverged.data.tags["diverged"] == "true"
    assert "train_loss" not in diverged.data.metrics
    assert "diverged" in err


def test_five_rows_train_and_the_real_batch_is_told(
    place: Place, command: Callable[..., Answer]
) -> None:
    rows = place.folder / "five rows.csv"
    rows.write_text("text,label\n" + "".join(f"a text {i},{i % 2}\n" for i in range(5)))
    code, out, err = command(
        "--json", data=rows.name, micro_batch=4, accumulation=4, max_steps=10, preset="adamw"
    )
    assert code == 0, err
    record = json.loads(out)
    assert record["metrics"]["effective_batch"] == 5
    assert any("16 samples a step were asked for" in warning for warning in record["warnings"])
    assert newest(place).inputs.dataset_inputs[0].dataset.name == "five rows.csv"  # type: ignore[union-attr]


def test_micro_batch_of_more_rows_than_there_are_is_refused(
    place: Place, command: Callable[..., Answer]
) -> None:
    rows = place.folder / "three.csv"
    rows.write_text("text,label\na,0\nb,1\nc,0\n")
    code, out, err = command("--json", data=rows.name, micro_batch=32)
    assert (code, out) == (2, "")
    assert "micro_batch=32: more than the data has (three.csv with 3 rows)" in err
