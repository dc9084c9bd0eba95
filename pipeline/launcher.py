"""Run one training in a process of its own and return its record, whatever becomes of it."""

import multiprocessing
import multiprocessing.forkserver
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from pipeline.config import Measurement, RunConfig
from pipeline.errors import Interrupted
from pipeline.record import Built, Event, Finished, Outcome, RunRecord, Started, Steps
from pipeline.recorder import Recorder
from pipeline.worker import start

# The worker's environment is the user's, less the variables known to change formats, memory, speed
# or the number of processes of a training behind our back.
_REMOVED = re.compile(
    r"MLFLOW_|ACCELERATE_|PYTORCH_(CUDA_|HIP_)?ALLOC_CONF$|PYTORCH_NO_CUDA_MEMORY_CACHING$"
    r"|NVIDIA_TF32_OVERRIDE$|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE$|CUDA_LAUNCH_BLOCKING$"
    r"|(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)$"
)
_SERVER_ENVIRONMENT = {
    # Asking whether there is a GPU must not initialise CUDA in the process that is forked from.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
_TICK_SECONDS = 0.25
_LOG_LINES = 15
_EXIT_SECONDS = 5.0


class Launched(NamedTuple):
    """A finished training: its record, its curves and the worker's output."""

    record: RunRecord
    recorder: Recorder
    log: str


class Launcher:
    """Starts workers from a fork server that has the slow imports done.

    The server begins to import on entry, while the caller goes on; `warm` waits until it is ready.
    """

    def __init__(self, start_worker: Callable[..., None] = start.worker) -> None:
        self._start_worker = start_worker
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")

    def __enter__(self) -> Self:
        self._context.set_forkserver_preload(["pipeline.worker.preload"])
        with _environment(_server_environment(os.environ)):
            multiprocessing.forkserver.ensure_running()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        server: Any = multiprocessing.forkserver._forkserver
        if server._forkserver_pid is not None:
            # Nothing is lost with it, and it may be seconds away from the end of its imports.
            os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()

    def warm(self) -> None:
        """Wait until a worker starts at once."""
        process = self._context.Process(target=start.nothing, daemon=True)
        process.start()
        process.join()

    def ask(self, job: Callable[..., None], *args: Any, timeout_seconds: float) -> Any:
        """Run `job(*args, connection)` in a worker and return what it sends.

        Raises EOFError where it ends without a word, TimeoutError where it takes too long.
        """
        receiver, sender = self._context.Pipe(duplex=False)
        process = self._context.Process(target=job, args=(*args, sender))
        process.start()
        sender.close()
        try:
            if not receiver.poll(timeout_seconds):
                raise TimeoutError
            return receiver.recv()
        finally:
            _end(process, 0)

    def launch(self, config: RunConfig, on_event: Callable[[Event], None]) -> Launched:
        """Train and measure; `on_event` sees each event as it comes, after the recorder."""
        recorder = Recorder(config.measurement.warmup_steps, config.workload.seq_len)

        def handle(event: Event) -> None:
            recorder.handle(event)
            on_event(event)

        with tempfile.TemporaryDirectory(prefix="pipeline-") as folder:
            log = Path(folder) / "worker.log"
            log.touch()
            receiver, sender = self._context.Pipe(duplex=False)
            process = self._context.Process(
                target=self._start_worker,
                args=(
                    config.model_dump_json(),
                    worker_environment(config),
                    sender,
                    str(log),
                    time.perf_counter(),
                ),
                daemon=False,  # a daemon may have no children, which a data loader's workers are
            )
            process.start()
            sender.close()
            interrupted, outcome = False, None
            try:
                outcome, message = _follow(process, receiver, config.measurement, handle)
            except Interrupted as error:
                interrupted, outcome, message = True, Outcome.FAILED, f"interrupted: {error}"
            finally:
                _end(process, _EXIT_SECONDS if recorder.finished else 0)
            _drain(receiver, handle)
            text = log.read_text(errors="replace")
            if outcome is None:
                outcome, message = _of_exit(process.exitcode, text, recorder.finished)
            record = recorder.record(config, outcome, message, interrupted)
            return Launched(record, recorder, text)


def _follow(
    process: ForkServerProcess,
    receiver: Connection,
    limits: Measurement,
    handle: Callable[[Event], None],
) -> tuple[Outcome | None, str]:
    """Hand on events until the worker ends or a limit is reached; no outcome means: it ended."""
    begun = moved = time.monotonic()
    while True:
        ready = wait([receiver, process.sentinel], timeout=_TICK_SECONDS)
        if receiver in ready:
            try:
                events = receiver.recv()
            except (EOFError, OSError):
                return None, ""
            for event in events:
                handle(event)
                if isinstance(event, Started | Built | Steps):
                    moved = time.monotonic()
                if isinstance(event, Finished):
                    return event.outcome, event.message
        elif process.sentinel in ready:
            return None, ""
        now = time.monotonic()
        if limits.timeout is not None and now - begun > limits.timeout:
            return Outcome.TIMEOUT, f"ended after timeout={limits.timeout:g} s"
        if now - moved > limits.stall_timeout:
            return Outcome.TIMEOUT, f"no step ended for stall_timeout={limits.stall_timeout:g} s"


def _end(process: ForkServerProcess, patience_seconds: float) -> None:
    """End the worker, whatever comes between: at exit Python would wait for it for ever."""
    try:
        process.join(patience_seconds)  # it spoke its last word: let it tidy up
    finally:
        process.kill()
        process.join()


def _drain(receiver: Connection, handle: Callable[[Event], None]) -> None:
    """Hand on what the worker had sent before it ended."""
    try:
        while receiver.poll():
            for event in receiver.recv():
                handle(event)
    except (EOFError, OSError):
        pass


def _of_exit(code: int | None, log: str, finished: Finished | None) -> tuple[Outcome, str]:
    """Return the outcome of a worker that ended without being waited for."""
    if finished is not None:
        return finished.outcome, finished.message
    last = "\n".join(log.strip().splitlines()[-_LOG_LINES:])
    # bitsandbytes prints this and exits with 1, so there is no exception to catch.
    if code == 1 and "out of memory" in last.lower():
        return Outcome.OUT_OF_MEMORY, last.splitlines()[-1]
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = " (the kernel kills so when memory runs out)" if name == "SIGKILL" else ""
        return Outcome.FAILED, f"the training process was killed by {name}{hint}"
    return Outcome.FAILED, f"the training process ended with exit code {code}: {last}"


def worker_environment(config: RunConfig) -> dict[str, str]:
    """Return the variables that this configuration needs set before CUDA is touched."""
    variables = {}
    if config.training.alloc_conf:
        variables["PYTORCH_ALLOC_CONF"] = config.training.alloc_conf
    if config.training.precision == "fp8":
        variables["ACCELERATE_MIXED_PRECISION"] = "fp8"
    device, _, index = config.measurement.device.partition(":")
    if device == "cuda":
        # With more than one visible the Trainer would spread the batch over all of them.
        variables["CUDA_VISIBLE_DEVICES"] = _visible_gpu(int(index or 0))
    return variables


def _visible_gpu(number: int) -> str:
    """Name one of the GPUs that the user shows; empty where there is no such one."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return str(number)
    # As CUDA reads it: what follows an entry that names no device is hidden.
    names = list(takewhile(lambda name: name not in ("", "-1"), map(str.strip, shown.split(","))))
    return names[number] if number < len(names) else ""


def _server_environment(environment: Mapping[str, str]) -> dict[str, str]:
    kept = {key: value for key, value in environment.items() if not _REMOVED.match(key)}
    paths = [str(Path(__file__).resolve().parents[1]), kept.get("PYTHONPATH", "")]
    return kept | _SERVER_ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Have exactly these variables for the block: the fork server takes over what it finds."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
