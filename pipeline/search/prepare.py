"""From what the user asked for to a search that can begin, or to every problem at once."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.config import RunConfig
from pipeline.errors import ConfigError
from pipeline.nvml import usable_gpus
from pipeline.preflight import look
from pipeline.search import asking, sampler
from pipeline.search.jobs import Plan
from pipeline.search.judge import read_floor
from pipeline.search.space import Candidate, batches, candidates, numbers, read_space, start_of
from pipeline.throughput import MIN_TIMED_STEPS

SAMPLERS = ("frugal", "tpe", "gp", "grid", "random")


class Asked(NamedTuple):
    """What the user asked a search for, in the user's words."""

    min_throughput: str
    effective_batch: str | None = None
    micro_batches: str | None = None
    space: str = "batch"
    sampler: str = "frugal"
    trials: int | None = None
    timeout: float | None = None


class Prepared(NamedTuple):
    """A search whose input is good."""

    start: RunConfig
    plan: Plan
    candidates: Sequence[Candidate]
    identity: Mapping[str, Any]
    """What must be the same for trials to belong to one study."""
    asked: Asked


def prepare(asked: Asked, start: RunConfig) -> Prepared:
    """Check all input of a search. Raises ConfigError."""
    floor = read_floor(asked.min_throughput)
    effective = numbers("effective_batch", asked.effective_batch)
    dimensions = read_space(asked.space)
    pairs = batches(start.training, effective, numbers("micro_batches", asked.micro_batches))
    found = candidates(start, pairs, dimensions)
    if not found:
        raise ConfigError(f"space={asked.space}: every combination contradicts itself here")
    first = start_of(start, effective, list(dimensions))
    _check(start, [first, *found])
    identity = {
        **{f"space: {name}": list(values) for name, values in dimensions.items()},
        "space: batches": ", ".join(f"{size}x{count}" for size, count in pairs),
        "min_throughput": asked.min_throughput,
        "device": _device(start.measurement.device),
        "memory_limit_mib": start.measurement.memory_limit_mib,
        **start.workload.model_dump(),
        **{f"start: {k}": v for k, v in first.applied(start).training.model_dump().items()},
    }
    plan = Plan(first, floor, _sampler(asked.sampler, found, start))
    return Prepared(start, plan, found, identity, asked)


def _device(device: str) -> str:
    """Return the device by its name, so that a study's figures are all of one kind."""
    kind, _, index = device.partition(":")
    gpus = usable_gpus() if kind == "cuda" else []
    return gpus[int(index or 0)] if int(index or 0) < len(gpus) else device


def _check(start: RunConfig, found: Sequence[Candidate]) -> None:
    """Raise where the data or the steps cannot serve every candidate."""
    largest = max(found, key=lambda candidate: candidate.effective_batch)
    whole = Candidate(largest.effective_batch, 1, largest.options).applied(start)
    problems = [one.problem.replace("micro_batch", "effective_batch", 1) for one in look(whole)]
    steps, least = start.workload.max_steps, start.measurement.warmup_steps + MIN_TIMED_STEPS
    if steps is not None and steps < least:
        parts = f"{start.measurement.warmup_steps} of warm-up and {MIN_TIMED_STEPS} to time"
        problems.append(f"max_steps={steps}: a search needs {least}: {parts}")
    if problems:
        raise ConfigError(*problems)


def _sampler(name: str, found: Sequence[Candidate], start: RunConfig) -> sampler.Sampler:
    seed, limit = start.workload.seed, start.measurement.memory_limit_mib
    match name:
        case "frugal":
            return sampler.Frugal(found, limit_mib=limit)
        case "tpe":
            return asking.tpe(found, seed)
        case "gp":
            return asking.gp(found, seed)
        case "grid":
            return sampler.InOrder(found)
        case "random":
            return sampler.shuffled(found, seed)
    raise ConfigError(f"sampler={name!r}: expected one of {', '.join(SAMPLERS)}")
