"""Processes of this machine: who started us, whether somebody still lives, who asks us to stop."""

import fcntl
import hashlib
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil

from pipeline.errors import Interrupted

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
        process = psutil.Process(int(pid))
        # A zombie has ended, however long nobody asks how.
        ended = process.status() == psutil.STATUS_ZOMBIE
        return not ended and f"{process.create_time():.2f}" == created
    except (psutil.Error, ValueError):
        return False


@contextmanager
def one_at_a_time(what: str) -> Iterator[None]:
    """Have this user's other commands wait that are about to do the same on this machine."""
    name = hashlib.sha256(what.encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"pipeline-{os.getuid()}-{name}.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file is closed
        yield


class _Interrupts:
    """Whether an interrupt has to wait, and which one does."""

    put_off = False
    waiting: str | None = None


def raise_interrupts() -> None:
    """Have the first Ctrl-C, SIGTERM or hang-up of the terminal raise Interrupted."""
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGHUP, _interrupt)


@contextmanager
def interrupts_put_off() -> Iterator[None]:
    """Let what must not be left half done come to its end; the interrupt is raised after it."""
    _Interrupts.put_off = True
    try:
        yield
    finally:
        _Interrupts.put_off = False
    name, _Interrupts.waiting = _Interrupts.waiting, None
    if name:
        raise Interrupted(name)


def _interrupt(number: int, frame: FrameType | None) -> None:
    # What follows the first signal is the orderly end; nothing but a second Ctrl-C disturbs it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    name = signal.Signals(number).name
    if not _Interrupts.put_off:
        raise Interrupted(name)
    _Interrupts.waiting = name
