"""The command line: options, help, and what a command says before and after its work."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from pipeline.cli import main


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
