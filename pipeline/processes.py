"""Processes of this machine: who started us, and whether somebody still lives."""

import os
import signal
import threading

import psutil

_LOOK_EVERY_SECONDS = 0.5


def mlflow_above() -> psutil.Process | None:
    """Return the `mlflow run` that this process was started by, if one did."""
    if "MLFLOW_RUN_ID" not in os.environ:
        return None
    for process in psutil.Process().parents():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if any(os.path.basename(word) == "mlflow" for word in command[:3]) and "run" in command:
            return process
    return None


def end_with(process: psutil.Process) -> None:
    """Have this process get a SIGTERM when that one ends.

    A `mlflow run` that is killed leaves the command that it started alive.
    """

    def watch() -> None:
        # wait() would do, but polls faster and faster; is_running() is safe against reused ids.
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            threading.Event().wait(_LOOK_EVERY_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    def guarded() -> None:
        try:
            watch()
        except psutil.NoSuchProcess:
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=guarded, name="end-with-mlflow", daemon=True).start()


def identity() -> str:
    """Return what names this process on this machine, however often its number is reused."""
    process = psutil.Process()
    return f"{process.pid}@{process.create_time():.2f}"


def is_alive(name: str) -> bool:
    """Return whether the process with this identity still runs on this machine."""
    pid, _, created = name.partition("@")
    try:
        return f"{psutil.Process(int(pid)).create_time():.2f}" == created
    except (psutil.Error, ValueError):
        return False
