"""What measuring costs: a measured training against a bare Trainer, in turn, many times.

    python benchmarks/overhead.py OUT.json [--pairs 10] [--workload laptop] [--set micro_batch=4]

Both trainings run in a fresh process from the same fork server and are timed by the same stopwatch,
from the end of a warm-up step to the end of the training, with the device synchronized at both.
The measured one is the whole product: memory monitor, callback, events, and a parent that logs to
MLflow. The bare one is a Trainer with nothing but the stopwatch. Order within a pair alternates.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pipeline.config import RunConfig
from pipeline.launcher import Launcher
from pipeline.preflight import prepare
from pipeline.presets import resolve
from pipeline.record import Event, Finished, Outcome, RunRecord
from pipeline.worker import start

WARMUP_STEPS = 5
RESULT = "OVERHEAD_RESULT"


def stopwatch() -> Any:
    """Return a TrainerCallback that writes the seconds after warm-up to the file in RESULT."""
    import torch
    from transformers import TrainerCallback

    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    class Stopwatch(TrainerCallback):
        begun = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == WARMUP_STEPS:
                self.begun = now()

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            Path(os.environ[RESULT]).write_text(f"{now() - self.begun} {state.global_step}")

    return Stopwatch()


def measured_worker(*arguments: Any) -> None:
    """Run the product's worker, with the stopwatch added to its Trainer."""
    from unittest.mock import patch

    from pipeline.worker.training import build_trainer as build

    def build_with_stopwatch(*args: Any) -> Any:
        trainer = build(*args)
        trainer.add_callback(stopwatch())
        return trainer

    with patch("pipeline.worker.entry.build_trainer", build_with_stopwatch):
        start.worker(*arguments)


def bare_worker(
    config: str, environment: Mapping[str, str], connection: Connection, log: str, requested: float
) -> None:
    """Run the same Trainer, without anything of ours."""
    os.environ.update(environment)
    import torch
    import transformers

    from pipeline.worker.training import build_trainer

    parsed = RunConfig.model_validate_json(config)
    device = torch.device("cpu" if parsed.measurement.device == "cpu" else "cuda:0")
    transformers.set_seed(parsed.workload.seed)
    with tempfile.TemporaryDirectory() as folder:
        build_trainer(parsed, device, stopwatch(), folder).train()
    connection.send([Finished(outcome=Outcome.COMPLETED)])


def run_measured(launcher: Launcher, config: RunConfig) -> RunRecord:
    """Train as the command `run` does, MLflow and progress included."""
    # Imported here, since each worker imports this script again on its way to its function.
    from rich.console import Console

    from pipeline.artifacts import write_artifacts
    from pipeline.progress import Progress
    from pipeline.recorder import Recorder
    from pipeline.report import note
    from pipeline.tracking import connect, end_run, tracked_run

    client = connect()
    with (
        tracked_run(client, config, time.time()) as tracked,
        Progress(Console(stderr=True, quiet=True), Recorder(1)) as progress,
        tempfile.TemporaryDirectory() as folder,
    ):

        def handle(event: Event) -> None:
            tracked.handle(event)
            progress.handle(event)

        launched = launcher.launch(config, handle)
        write_artifacts(launched, Path(folder))
        tracked.finish(launched.record, note(launched.record), Path(folder))
        end_run(launched.record)
    return launched.record


def steps_per_second(record: RunRecord) -> float:
    """Return what the stopwatch read in the training that just ended."""
    if record.outcome is not Outcome.COMPLETED:
        raise SystemExit(record.message)
    seconds, steps = Path(os.environ[RESULT]).read_text().split()
    return (int(steps) - WARMUP_STEPS) / float(seconds)


def main() -> None:
    """Run the pairs and write the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--preset", default="adamw")
    parser.add_argument("--workload", default="laptop")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    options = parser.parse_args()
    settings = dict(item.split("=", 1) for item in options.set)
    config = prepare(resolve(options.preset, options.workload, settings))
    ratios, rows = [], []
    with tempfile.TemporaryDirectory() as folder:
        os.environ[RESULT] = f"{folder}/seconds"
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
        with Launcher(measured_worker) as launcher:
            bare = Launcher(bare_worker)  # the fork server is one for all
            launcher.warm()
            for pair in range(options.pairs + 1):
                speeds = {}
                for kind in ("bare", "measured") if pair % 2 else ("measured", "bare"):
                    if kind == "measured":
                        speeds[kind] = steps_per_second(run_measured(launcher, config))
                    else:
                        record = bare.launch(config, lambda event: None).record
                        speeds[kind] = steps_per_second(record)
                if pair:  # the first pair warms the machine
                    rows.append(speeds)
                    ratios.append(speeds["measured"] / speeds["bare"])
                    print(pair, speeds, f"ratio {ratios[-1]:.4f}", flush=True)
    quartiles = statistics.quantiles(ratios, n=4)
    result = {
        "preset": options.preset,
        "workload": options.workload,
        "settings": settings,
        "median_ratio": statistics.median(ratios),
        "quartiles": [quartiles[0], quartiles[2]],
        "pairs": rows,
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"measured / bare: median {result['median_ratio']:.4f}, quartiles {result['quartiles']}")


if __name__ == "__main__":
    main()
