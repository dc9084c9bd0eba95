"""What a search costs, by sampler: measured once as a whole grid, then replayed.

    python benchmarks/search_cost.py grid results/search-grid.json --budget 230
    python benchmarks/search_cost.py replay results/search-grid.json results/search-cost.csv

`grid` trains every configuration for a few steps and stores the time of each step; what the budget
does not suffice for is left to the next call with the same file. `replay` gives each sampler the
stored steps instead of a GPU, resampled by the seed, and stops each training where the adaptive
measurement would. The cost is that of all trainings: start, trials, and the winner's whole epoch.

`frugal` ends by itself. Every other sampler, and `frugal, stopped`, is stopped for it as soon as it
has met the optimum, which nobody could do who does not know it.
"""

import argparse
import csv
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import optuna
from optuna.samplers import TPESampler

from pipeline.config import Measurement, RunConfig, Workload
from pipeline.launcher import Launcher
from pipeline.preflight import with_device
from pipeline.presets import resolve
from pipeline.record import Outcome, StepMark
from pipeline.search import asking
from pipeline.search.jobs import Entry, Job, Plan
from pipeline.search.judge import EQUAL_MEMORY, Floor, Measured
from pipeline.search.loop import training
from pipeline.search.sampler import Frugal, Sampler, shuffled
from pipeline.search.space import Candidate, batches, candidates, read_space, start_of
from pipeline.search.study import distributions, parameters
from pipeline.throughput import rate
from pipeline.worker.adaptive import StopWhenKnown

STEPS = 8
EPOCH_SAMPLES = 512
IMPORT_SECONDS = 10.0
"""What a script of one's own waits for its imports before the first trial."""
REBUILD_SECONDS = 0.5
"""What building model and Trainer takes it before each trial."""
FLOORS = (0.5, 0.9, 1.0)


class Stored(NamedTuple):
    """One configuration of the grid, as it was measured."""

    outcome: str
    memory_mib: float | None
    overhead_seconds: float
    """Wall time of the training beyond its steps: start, building, end."""
    step_seconds: list[float]
    message: str = ""


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("grid", "replay"))
    parser.add_argument("grid", type=Path)
    parser.add_argument("out", type=Path, nargs="?", default=Path("results/search-cost.csv"))
    parser.add_argument("--workload", default="bert-base")
    parser.add_argument("--preset", default="adamw")
    parser.add_argument("--space", default="benchmarks/search_space.yaml")
    parser.add_argument("--effective_batch", type=int, default=16)
    parser.add_argument("--budget", type=float, default=230.0, help="seconds")
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # A replay needs no GPU, but the grid's own configurations.
    device = {"device": "cuda"} if given.what == "replay" else {}
    start = with_device(resolve(given.preset, given.workload, device))
    dimensions = read_space(given.space)
    pairs = batches(start.training, [given.effective_batch], [])
    found = candidates(start, pairs, dimensions)
    first = start_of(start, [given.effective_batch], list(dimensions))
    if given.what == "grid":
        measure_grid(start, found, given.grid, time.monotonic() + given.budget)
    else:
        rows = list(replays(start, first, found, load(given.grid), given.seeds))
        write(rows, given.out)


def load(path: Path) -> dict[str, Stored]:
    """Return what was measured up to now."""
    if not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    return {key: Stored(**values) for key, values in content["configurations"].items()}


def measure_grid(start: RunConfig, found: Sequence[Candidate], path: Path, deadline: float) -> None:
    """Train what the file lacks, each in a fresh process, and keep it at once."""
    grid, device = load(path), ""
    with Launcher() as launcher:
        launcher.warm()
        for candidate in found:
            if candidate.key in grid or time.monotonic() > deadline:
                continue
            begun = time.perf_counter()
            launched = launcher.launch(short(candidate.applied(start)), lambda event: None)
            wall = time.perf_counter() - begun
            record, seconds = launched.record, launched.recorder.step_seconds()
            memory = record.metrics.get("peak_memory_mib")
            device = record.device.name if record.device else device
            grid[candidate.key] = Stored(
                record.outcome, memory, wall - sum(seconds), seconds, record.message
            )
            stored = {key: value._asdict() for key, value in grid.items()}
            content = {"device": device, "start": start.dotted(), "configurations": stored}
            path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            print(f"{len(grid)}/{len(found)} {candidate.key}: {memory} MiB, {wall:.2f} s")
    left = sum(candidate.key not in grid for candidate in found)
    print(f"{left} of {len(found)} left{': run the same command again' if left else ''}")


def short(config: RunConfig) -> RunConfig:
    """Return the training, cut to a few steps."""
    values = config.workload.model_dump() | {"max_steps": STEPS}
    return config.model_copy(update={"workload": Workload.model_validate(values)})


class Replay:
    """Stands for the GPU: hands out stored steps, and counts what they cost."""

    def __init__(self, grid: dict[str, Stored], seed: int) -> None:
        self._grid = grid
        self._draw = random.Random(seed)
        self.steps = 0
        self.seconds = 0.0

    def train(self, config: RunConfig, candidate: Candidate) -> Measured:
        """Train as the worker would: until enough is known, or the steps are done."""
        stored, own = self._grid[candidate.key], config.measurement
        self.seconds += stored.overhead_seconds
        if stored.outcome != Outcome.COMPLETED:
            self.seconds += sum(stored.step_seconds)
            self.steps += len(stored.step_seconds)
            return Measured(outcome=Outcome(stored.outcome), memory_mib=stored.memory_mib)
        seconds = list(self._steps(config, candidate, stored, own))
        self.steps += len(seconds)
        self.seconds += sum(seconds)
        timed = seconds[own.warmup_steps :]
        speed = rate([candidate.effective_batch] * len(timed), timed)
        assert speed
        return Measured(
            outcome=Outcome.COMPLETED,
            memory_mib=stored.memory_mib,
            speed=speed.mean,
            speed_low=speed.low,
            speed_high=speed.high,
            steps=len(seconds),
        )

    def _steps(
        self, config: RunConfig, candidate: Candidate, stored: Stored, own: Measurement
    ) -> Iterator[float]:
        warmup, steady = stored.step_seconds[: own.warmup_steps], stored.step_seconds[3:]
        taken = round((stored.memory_mib or 0.0) * 1024**2)
        stopping = StopWhenKnown(own, lambda: taken)
        total = config.workload.max_steps or -(-EPOCH_SAMPLES // candidate.effective_batch)
        clock = 0.0
        for number in range(1, total + 1):
            seconds = warmup[number - 1] if number <= len(warmup) else self._draw.choice(steady)
            begun, clock = clock, clock + seconds
            yield seconds
            marks = [StepMark(number, begun, clock, candidate.effective_batch)]
            if own.measure == "adaptive" and stopping.enough(marks):
                return


def searched(
    start: RunConfig,
    plan: Plan,
    replay: Replay,
    goal: float,
    *,
    knows_its_end: bool,
) -> tuple[float | None, int]:
    """Return the memory of the confirmed winner, and the number of trainings.

    A sampler that does not know when it is done is stopped as soon as it has met the optimum.
    """
    entries: list[Entry] = []
    while True:
        known = plan.known(entries)
        met = known is not None and (known.best_mib or goal * 9) <= goal * (1 + EQUAL_MEMORY)
        job = plan.next_job(entries, may_try=knows_its_end or not met)
        if not isinstance(job, Job):
            return known.best_mib if known else None, len(entries)
        result = replay.train(training(start, job, plan.floor, known), job.candidate)
        entries.append(Entry(len(entries), job, result))


def plain_loop(
    found: Sequence[Candidate], grid: dict[str, Stored], seed: int, floor: float, goal: float
) -> tuple[float, int, int]:
    """Return seconds, steps and trials until a loop as one writes it has met the optimum.

    TPE, every trial a whole epoch in one process, the floor as a constraint; what is proposed again
    is trained again. Memory left over from earlier trials, which such a loop suffers from, is not
    replayed.
    """
    space = distributions(found)
    known = {tuple(sorted(parameters(c, space).items())): c for c in found}
    study = optuna.create_study(sampler=TPESampler(seed=seed))
    seconds, steps, count = IMPORT_SECONDS, 0, 0
    while count < 10 * len(found):
        count += 1
        trial = study.ask(dict(space))
        candidate = known[tuple(sorted(trial.params.items()))]
        stored = grid[candidate.key]
        epoch = -(-EPOCH_SAMPLES // candidate.effective_batch)
        pace = statistics.median(stored.step_seconds[3:] or [0.0])
        seconds, steps = seconds + REBUILD_SECONDS + epoch * pace, steps + epoch
        speed = candidate.effective_batch / pace if pace else 0.0
        trial.set_constraint("floor", floor - speed)
        study.tell(trial, stored.memory_mib or 1e6)
        if speed >= floor and (stored.memory_mib or 1e6) <= goal * (1 + EQUAL_MEMORY):
            break
    return seconds, steps, count


def replays(
    start: RunConfig,
    first: Candidate,
    found: Sequence[Candidate],
    grid: dict[str, Stored],
    seeds: int,
) -> Iterator[dict[str, object]]:
    """Yield one row per sampler, floor and seed."""
    missing = [c.key for c in found if c.key not in grid]
    if missing:
        raise SystemExit(f"the grid lacks {len(missing)} configurations: run `grid` again")
    own = [grid[c.key] for c in found]
    whole = sum(stored.overhead_seconds + sum(stored.step_seconds) for stored in own)
    makers: dict[str, Callable[[int], Sampler]] = {
        "frugal": lambda seed: Frugal(found),
        "frugal, stopped": lambda seed: Frugal(found),
        "tpe": lambda seed: asking.tpe(found, seed),
        "gp": lambda seed: asking.gp(found, seed),
        "random": lambda seed: shuffled(found, seed),
    }
    for share in FLOORS:
        floor = share * speed_of(grid[first.key], first)
        goal = optimum(found, grid, floor)
        for seed in range(seeds):
            row: dict[str, object] = {"floor": share, "seed": seed, "optimum_mib": goal}
            for name, make in makers.items():
                replay = Replay(grid, seed)
                plan = Plan(first, Floor(share, is_share=True), make(seed))
                best, count = searched(start, plan, replay, goal, knows_its_end=name == "frugal")
                yield row | cost(name, replay.seconds, replay.steps, count, whole, best)
            seconds, steps, count = plain_loop(found, grid, seed, floor, goal)
            yield row | cost("plain loop", seconds, steps, count, whole, goal)


def cost(
    name: str, seconds: float, steps: int, trainings: int, whole: float, best: float | None
) -> dict[str, object]:
    """Return the columns that tell what one search cost."""
    share = round(seconds / whole, 4)
    return {
        "sampler": name,
        "found_mib": best,
        "trainings": trainings,
        "steps": steps,
        "seconds": round(seconds, 2),
        "share_of_grid": share,
    }


def speed_of(stored: Stored, candidate: Candidate) -> float:
    """Return samples per second of the stored steady steps."""
    steady = stored.step_seconds[3:]
    return candidate.effective_batch * len(steady) / sum(steady) if steady else 0.0


def optimum(found: Sequence[Candidate], grid: dict[str, Stored], floor: float) -> float:
    """Return the grid's own least memory at this floor."""
    rows = [(grid[c.key].memory_mib, speed_of(grid[c.key], c)) for c in found]
    return min(memory for memory, speed in rows if memory and speed >= floor)


def write(rows: Sequence[dict[str, object]], path: Path) -> None:
    """Write every replay, and print what they come to."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    for floor, name in sorted({(row["floor"], row["sampler"]) for row in rows}, key=str):
        own = [row for row in rows if (row["floor"], row["sampler"]) == (floor, name)]
        shares = [float(str(row["share_of_grid"])) for row in own]
        hits = sum(
            float(str(row["found_mib"])) <= float(str(row["optimum_mib"])) * (1 + EQUAL_MEMORY)
            for row in own
            if row["found_mib"] is not None
        )
        print(
            f"floor {floor:<4} {name:<15} found the optimum {hits} of {len(own)}, "
            f"{statistics.median(shares):.1%} of the grid's seconds (worst {max(shares):.1%})"
        )


if __name__ == "__main__":
    main()
