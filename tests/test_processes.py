"""Who started us, and whether somebody still lives."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pipeline import processes

ROOT = Path(__file__).parent.parent
LIMIT_SECONDS = 10


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Return a process that does nothing until it is ended."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield child
    child.kill()
    child.wait()


def below(tmp_path: Path, script: str, word: str, code: str) -> str:
    """Return what `code` prints when a python script of this name was called with this word."""
    path = tmp_path / script
    path.write_text(
        "import subprocess, sys\n"
        f"ran = subprocess.run([sys.executable, '-c', {code!r}], capture_output=True, text=True)\n"
        "print(ran.stdout + ran.stderr)\n"
    )
    environment = os.environ | {"MLFLOW_RUN_ID": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, str(path), word],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout.strip()


WHO = (
    "from pipeline.processes import mlflow_above; found = mlflow_above(); "
    "print(found and found.cmdline()[1].split('/')[-1])"
)


def test_mlflow_run_above_is_found(tmp_path: Path) -> None:
    assert below(tmp_path, "mlflow", "run", WHO) == "mlflow"


@pytest.mark.parametrize(("script", "word"), [("mlflow", "ui"), ("other", "run")])
def test_other_command_above_is_not_taken_for_mlflow_run(
    tmp_path: Path, script: str, word: str
) -> None:
    assert below(tmp_path, script, word, WHO) == "None"


def test_nobody_is_above_a_command_that_mlflow_did_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    assert processes.mlflow_above() is None


def test_process_ends_with_the_one_it_was_tied_to(sleeper: subprocess.Popen[bytes]) -> None:
    code = (
        "import psutil, sys, time; from pipeline.processes import end_with; "
        f"end_with(psutil.Process({sleeper.pid})); print('tied', flush=True); time.sleep(60)"
    )
    tied = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert tied.stdout
        assert tied.stdout.readline() == "tied\n"
        assert tied.poll() is None
        sleeper.kill()  # nobody waits for it yet: it is a zombie, as under `mlflow run`
        assert tied.wait(LIMIT_SECONDS) == -signal.SIGTERM
    finally:
        tied.kill()
        tied.communicate()


def test_living_process_is_alive(sleeper: subprocess.Popen[bytes]) -> None:
    created = psutil.Process(sleeper.pid).create_time()
    assert processes.is_alive(f"{sleeper.pid}@{created:.2f}")


def test_this_process_is_alive_by_its_own_name() -> None:
    assert processes.is_alive(processes.identity())


def test_ended_process_is_not_alive(sleeper: subprocess.Popen[bytes]) -> None:
    created = psutil.Process(sleeper.pid).create_time()
    sleeper.kill()
    sleeper.wait()
    assert not processes.is_alive(f"{sleeper.pid}@{created:.2f}")


def test_process_that_took_over_a_number_is_another_one(
    sleeper: subprocess.Popen[bytes],
) -> None:
    created = psutil.Process(sleeper.pid).create_time()
    assert not processes.is_alive(f"{sleeper.pid}@{created - 100:.2f}")


@pytest.mark.parametrize("name", ["", "@", "x@1.00", "4321"])
def test_name_that_is_none_is_not_alive(name: str) -> None:
    assert not processes.is_alive(name)
