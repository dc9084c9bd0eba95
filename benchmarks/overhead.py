"""What measuring costs: the same training measured and unmeasured in turn, block by block.

    python benchmarks/overhead.py OUT.json [--blocks 40] [--steps 10] [--set FIELD=VALUE]

Whole trainings in turn differ by 10 to 40 % on a shared machine, far more than what is looked for
here; neighbouring blocks of one training differ by a few percent. In every other block the memory
watcher, the callback and all that follows from them (events to the parent, its progress line, its
curves in MLflow) rest; a stopwatch that runs in all of them, and synchronizes the device at both
ends of a block, times them. What the parent does with points that are up to three seconds old can
fall into either kind of block, so its processor time is given apart.
"""

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipeline.config import RunConfig
from pipeline.launcher import Launcher
from pipeline.preflight import prepare
from pipeline.presets import resolve
from pipeline.record import Event, Outcome
from pipeline.worker import start

WARMUP_STEPS = 10
RESULT, STEPS = "OVERHEAD_RESULT", "OVERHEAD_STEPS"


def alternating_worker(*arguments: Any) -> None:
    """Run the product's worker, with everything that measures at rest in every other block."""
    from unittest.mock import patch

    from pipeline.worker import training

    measuring = Measuring()
    measuring.set()

    def build(*args: Any) -> Any:
        trainer = training.build_trainer(*args)
        trainer.add_callback(stopwatch(measuring))
        return trainer

    entry = "pipeline.worker.entry"
    with (
        patch(f"{entry}.MemoryMonitor", resting_monitor(measuring)),
        patch(f"{entry}.MemoryCallback", resting_callback(measuring)),
        patch(f"{entry}.build_trainer", build),
    ):
        start.worker(*arguments)


def resting_monitor(measuring: "Measuring") -> Any:
    """Return a MemoryMonitor whose watcher, and whose thread, wait for `measuring`."""
    from pipeline.worker.memory import MemoryMonitor

    class Monitor(MemoryMonitor):
        def __enter__(self) -> "Monitor":
            super().__enter__()
            measuring.watcher = self.watcher.pid
            return self

        def _next_line(self, rows: Any) -> str:
            measuring.wait()
            return super()._next_line(rows)

        def stop(self) -> None:
            measuring.set()
            super().stop()

    return Monitor


class Measuring(threading.Event):
    """Set while the training is measured; the watching process is stopped meanwhile."""

    watcher: int | None = None

    def set(self) -> None:
        super().set()
        if self.watcher:
            os.kill(self.watcher, signal.SIGCONT)

    def clear(self) -> None:
        super().clear()
        if self.watcher:
            os.kill(self.watcher, signal.SIGSTOP)


def resting_callback(measuring: threading.Event) -> Any:
    """Return a MemoryCallback that looks away unless `measuring`."""
    from pipeline.worker.callback import MemoryCallback

    def unless_resting(name: str) -> Any:
        original = getattr(MemoryCallback, name)

        def method(self: Any, *args: Any, **kwargs: Any) -> None:
            if measuring.is_set():
                original(self, *args, **kwargs)

        return method

    names = ("on_step_begin", "on_substep_end", "on_step_end")
    return type("Callback", (MemoryCallback,), {name: unless_resting(name) for name in names})


def stopwatch(measuring: threading.Event) -> Any:
    """Return a TrainerCallback that times blocks, turns measuring over, and writes the times."""
    import torch
    from transformers import TrainerCallback

    steps = int(os.environ[STEPS])

    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    class Stopwatch(TrainerCallback):
        begun: float | None = None
        blocks: list[tuple[bool, float]] = []  # noqa: RUF012 - one instance a process

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step < WARMUP_STEPS or (state.global_step - WARMUP_STEPS) % steps:
                return
            ended = now()
            if self.begun is not None:
                self.blocks.append((measuring.is_set(), (ended - self.begun) / steps))
            measuring.clear() if measuring.is_set() else measuring.set()
            self.begun = now()

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            Path(os.environ[RESULT]).write_text(json.dumps(self.blocks))

    return Stopwatch()


def train(launcher: Launcher, config: RunConfig) -> float:
    """Train as the command `run` does; return the parent's processor time as a share of a core."""
    # Imported here, since each worker imports this script again on its way to its function.
    from rich.console import Console

    from pipeline.progress import Progress
    from pipeline.tracking import connect, end_run, tracked_run

    with (
        tracked_run(connect(), config, time.time()) as tracked,
        Progress(Console(stderr=True, quiet=True)) as progress,
    ):

        def handle(event: Event) -> None:
            tracked.handle(event)
            progress.handle(event)

        busy, begun = time.process_time(), time.monotonic()
        record = launcher.launch(config, handle).record
        share = (time.process_time() - busy) / (time.monotonic() - begun)
        end_run(record)
    if record.outcome is not Outcome.COMPLETED:
        raise SystemExit(record.message)
    return share


def ratios(blocks: Sequence[tuple[bool, float]]) -> list[float]:
    """Return speed measured over speed unmeasured for each block and the next.

    Which of the two comes first changes from pair to pair, so a drift cancels out.
    """
    return [b[1] / a[1] if a[0] else a[1] / b[1] for a, b in pairwise(blocks)]


def interval(values: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """Return a 95 % bootstrap interval of the median."""
    generator = random.Random(0)
    medians = sorted(
        statistics.median(generator.choices(values, k=len(values))) for _ in range(draws)
    )
    return medians[int(draws * 0.025)], medians[int(draws * 0.975)]


def main() -> None:
    """Run the blocks and write their times and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--steps", type=int, default=10, help="steps a block")
    parser.add_argument("--preset", default="adamw")
    parser.add_argument("--workload", default="laptop")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    options = parser.parse_args()
    settings = dict(item.split("=", 1) for item in options.set)
    length = {"max_steps": WARMUP_STEPS + options.steps * options.blocks, "epochs": 100_000}
    config = prepare(resolve(options.preset, options.workload, settings | length))
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            RESULT: f"{folder}/blocks",
            STEPS: str(options.steps),
            "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        }
        with Launcher(alternating_worker) as launcher:
            launcher.warm()
            parent = train(launcher, config)
        blocks = json.loads(Path(os.environ[RESULT]).read_text())
    found = ratios(blocks)
    low, high = interval(found)
    result = {
        "preset": options.preset,
        "workload": options.workload,
        "settings": settings,
        "steps_a_block": options.steps,
        "measured_over_unmeasured": statistics.median(found),
        "interval_95": [low, high],
        "parent_share_of_a_core": parent,
        "seconds_a_step": [{"measured": kind, "seconds": seconds} for kind, seconds in blocks],
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"{options.preset} on {options.workload} {settings}: a measured training keeps "
        f"{statistics.median(found):.2%} (95 %: {low:.2%} to {high:.2%}) of the speed; "
        f"the parent takes {parent:.1%} of a core"
    )


if __name__ == "__main__":
    main()
