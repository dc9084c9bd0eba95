"""The command line: options, help, and what a command says before and after its work."""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from pipeline.cli import main
from pipeline.config import RunConfig
from pipeline.launcher import Launched
from pipeline.preflight import why_no_gpu
from pipeline.record import Outcome, RunRecord
from pipeline.recorder import Recorder


class Answer(NamedTuple):
    """What a command gave back."""

    code: int
    out: str
    err: str


Command = Callable[..., Answer]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """Return a function that runs the command line in this process."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}

    def run(*words: str) -> Answer:
        with pytest.raises(SystemExit) as end:
            main(words)
        return Answer(int(end.value.code or 0), *capsys.readouterr())

    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this machine has a GPU."""
    monkeypatch.setattr("pipeline.nvml.usable_gpus", lambda: ["H200"])
    monkeypatch.setattr("pipeline.preflight.version", lambda name: "2.13.0")


# Each of these asks for more than the data has, so that nothing is started.


@pytest.mark.usefixtures("_gpu")
def test_auto_minds_the_device_of_the_presets_file(tmp_path: Path, command: Command) -> None:
    (tmp_path / "p.yaml").write_text("device: cpu\nmicro_batch: 9999\n")
    code, _, err = command("run", "--preset", str(tmp_path / "p.yaml"))
    assert code == 2
    assert "samples=256" in err  # the laptop's
    code, _, err = command("run", "--preset", str(tmp_path / "p.yaml"), "--device", "cuda")
    assert "samples=512" in err


@pytest.mark.usefixtures("_gpu")
def test_device_that_is_none_says_nothing_of_a_workload(command: Command) -> None:
    code, _, err = command("run", "--device", "gpu")
    assert code == 2
    assert err.startswith("error: command line: device='gpu': expected auto, cpu, cuda or ")
    assert "article" not in err


def test_argument_of_the_trainer_is_found_with_a_hyphen(command: Command) -> None:
    code, _, err = command("run", "--weight-decay", "0.1")
    assert code == 2
    assert "unknown key 'weight_decay': set it in training_arguments" in err


# What is said of the device


@pytest.mark.parametrize(
    ("gpus", "torch_version", "asked", "reason"),
    [
        ([], "2.13.0", "auto", "no GPU is visible"),
        (["H200"], "2.13.0+cpu", "auto", "this torch is a CPU build"),
        (["H200"], "2.13.0", "cpu", "as asked for"),
    ],
)
def test_training_without_gpu_figures_says_why_and_what_is_measured(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str], torch_version: str, asked: str, reason: str
) -> None:
    monkeypatch.setattr("pipeline.nvml.usable_gpus", lambda: gpus)
    monkeypatch.setattr("pipeline.preflight.version", lambda name: torch_version)
    line = why_no_gpu(asked) or ""
    assert reason in line
    assert line.endswith("measured is the memory of the training process, not a GPU's")


@pytest.mark.usefixtures("_gpu")
def test_training_on_a_gpu_needs_no_excuse() -> None:
    assert why_no_gpu("auto") is None


# After the training


@pytest.mark.parametrize(
    ("outcome", "interrupted", "unlogged", "expected"),
    [
        (Outcome.COMPLETED, False, [], 0),
        (Outcome.COMPLETED, False, ["the disk is full"], 4),
        (Outcome.OUT_OF_MEMORY, False, ["the disk is full"], 3),
        (Outcome.FAILED, True, ["the disk is full"], 130),
    ],
)
def test_record_is_printed_and_its_outcome_comes_before_what_was_not_logged(
    command: Command,
    config: RunConfig,
    monkeypatch: pytest.MonkeyPatch,
    outcome: Outcome,
    interrupted: bool,
    unlogged: list[str],
    expected: int,
) -> None:
    import pipeline.run

    record = RunRecord(
        config=config, outcome=outcome, interrupted=interrupted, started_at=0.0, ended_at=1.0
    )
    launched = Launched(record, Recorder(warmup_steps=1), "")
    ran = pipeline.run.Ran("the-run", "0", launched, unlogged)
    monkeypatch.setattr(pipeline.run, "run", lambda *_: ran)
    code, out, err = command("run", "--json", "--workload", "laptop", "--device", "cpu")
    assert code == expected
    assert RunRecord.model_validate_json(out) == record
    assert [problem for problem in unlogged if f"error: {problem}" not in err] == []


# Help and doctor


def test_help_shows_defaults_and_choices(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = command("run", "--help")
    assert code == 0
    assert "fp32, tf32, bf16, fp16, fp8, pure_bf16 [fp32]" in out
    assert "[adamw_torch_fused]" in out


def test_doctor_prints_its_findings_as_one_document(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.doctor._version", lambda package: None)
    code, out, err = command("doctor", "--json")
    assert code == 1
    found = {finding["what"]: finding for finding in json.loads(out)}
    assert not found["torch"]["ok"]
    assert found["torch"]["found"].startswith("missing: ")
    assert "to mend" in err


def test_estimate_prints_one_document_and_needs_no_gpu(command: Command) -> None:
    words = ("--preset", "bf16+checkpointing", "--workload", "laptop", "--device", "a100-40")
    code, out, err = command("estimate", *words, "--json")
    assert code == 0
    document = json.loads(out)
    assert document["device"] == "a100-40"
    assert document["fits"] is True
    assert document["peak_memory_mib"] > document["peak_reserved_mib"]
    assert document["peak_reserved_mib"] >= document["peak_allocated_mib"]
    assert "fits on a100-40" in err


def test_estimate_says_which_cards_it_knows(command: Command) -> None:
    code, _, err = command("estimate", "--device", "abacus")
    assert code == 2
    assert "expected one of h200" in " ".join(err.split())


def test_estimate_of_what_cannot_be_predicted_ends_with_3(command: Command) -> None:
    words = ("--workload", "laptop", "--optimizer", "lomo")
    code, out, err = command("estimate", *words, "--json")
    assert code == 3
    assert json.loads(out)["reason"].startswith("optimizer=lomo needs the package")
    assert "no prediction" in err
