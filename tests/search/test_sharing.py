"""Several processes on one study, and processes that are killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from tests.search.conftest import Bench

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ALL = [
    *(f"start {number}: 4x2" for number in (1, 2, 3)),
    *(f"trial: {size}x{8 // size}" for size in (1, 2, 8)),
    "confirm: 2x4",
]


def start(url: str, log: Path, seconds: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.search.sharing", url, str(log), str(seconds)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen[bytes]) -> None:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output.decode()


def states(url: str) -> list[TrialState]:
    return [trial.state for trial in optuna.load_study(storage=url, study_name="s").trials]


def lines(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def test_study_goes_on_after_its_process_was_killed(bench: Bench, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = start(bench.url, log, 0.3)
    while len(lines(log)) < 5:
        time.sleep(0.05)
        assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert TrialState.RUNNING in states(bench.url)
    done = lines(log)
    finish(start(bench.url, log, 0.0))
    assert TrialState.RUNNING not in states(bench.url)
    # Only what was under way is measured anew.
    assert lines(log) == [*done, done[-1], *ALL[5:]]


def test_two_processes_share_a_study_and_measure_nothing_twice(
    bench: Bench, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    both = [start(bench.url, log, 0.1) for _ in range(2)]
    for process in both:
        finish(process)
    assert sorted(lines(log)) == sorted(ALL)
    assert TrialState.RUNNING not in states(bench.url)


def test_two_processes_share_a_study_in_postgresql(postgresql: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    both = [start(postgresql, log, 0.1) for _ in range(2)]
    for process in both:
        finish(process)
    assert sorted(lines(log)) == sorted(ALL)
    assert TrialState.RUNNING not in states(postgresql)
