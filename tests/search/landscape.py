"""Formulas that stand for a GPU: memory and speed of every configuration, and their optimum."""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline.record import Outcome
from pipeline.search.judge import Measured
from pipeline.search.monotone import Known
from pipeline.search.sampler import Sampler
from pipeline.search.space import Candidate

Formula = Callable[[Candidate], Measured]
SETTINGS: Mapping[str, Sequence[Any]] = {
    "gradient_checkpointing": [False, True],
    "precision": ["fp32", "bf16", "pure_bf16"],
    "optimizer": ["adamw_torch_fused", "adafactor"],
}


def space(effective: int, settings: Mapping[str, Sequence[Any]]) -> list[Candidate]:
    sizes = [size for size in range(1, effective + 1) if effective % size == 0]
    return [
        Candidate(size, effective // size, tuple(zip(settings, values, strict=True)))
        for values in itertools.product(*settings.values())
        for size in sizes
    ]


def completed(memory: float, speed: float) -> Measured:
    return Measured(
        outcome=Outcome.COMPLETED,
        memory_mib=memory,
        speed=speed,
        speed_low=speed * 0.97,
        speed_high=speed * 1.03,
        steps=10,
        seconds=2.0,
    )


def training(seed: int, noise: float = 0.03) -> Formula:
    """Return a training whose memory and time are made as a real one's are, sizes at random."""
    draw = random.Random(seed)
    context, weights = draw.uniform(500, 900), draw.choice([60.0, 440.0, 1300.0])
    sample, work = draw.uniform(20, 400), 1 / draw.uniform(60, 900)
    launch, optimizer = draw.uniform(0.003, 0.02), draw.uniform(0.002, 0.01)
    seen: dict[Candidate, Measured] = {}

    def formula(candidate: Candidate) -> Measured:
        options = dict(candidate.options)
        half, pure = options.get("precision") == "bf16", options.get("precision") == "pure_bf16"
        again, factors = (
            options.get("gradient_checkpointing"),
            options.get("optimizer") == "adafactor",
        )
        own = weights * (0.5 if pure else 1.0)
        state = own * (0.02 if factors else 2.0)
        acts = sample * (0.55 if half or pure else 1.0) * (0.2 if again else 1.0)
        alive = own if candidate.accumulation > 1 else 0.0
        forward = own + state + alive + acts * candidate.micro_batch + (own / 2 if half else 0.0)
        memory = context + max(forward, 2 * own + state)
        compute = work * (0.3 if half or pure else 1.0) * (1.33 if again else 1.0)
        host = launch * (1.3 if half else 1.0) * (1.35 if again else 1.0)
        seconds = candidate.accumulation * max(compute * candidate.micro_batch, host)
        seconds += optimizer * (10.0 if factors else 1.0)
        if candidate not in seen:
            bump = 1 + draw.gauss(0, noise / 8)
            pace = 1 + draw.gauss(0, noise)
            seen[candidate] = completed(memory * bump, candidate.effective_batch / seconds * pace)
        return seen[candidate]

    return formula


def monotone(seed: int, effective: int) -> Formula:
    """Return any curves that rise with the micro-batch, but for small bumps."""
    draw = random.Random(seed)
    memories = sorted(draw.uniform(500, 20000) for _ in range(effective + 1))
    speeds = sorted(draw.uniform(5, 500) for _ in range(effective + 1))
    bumps = [1 + draw.uniform(-0.002, 0.002) for _ in range(effective + 1)]
    paces = [1 + draw.uniform(-0.06, 0.06) for _ in range(effective + 1)]

    def formula(candidate: Candidate) -> Measured:
        size = candidate.micro_batch
        alone = 0.0 if candidate.accumulation > 1 else -min(300.0, memories[size] / 3)
        return completed(memories[size] * bumps[size] + alone, speeds[size] * paces[size])

    return formula


def least(candidates: Sequence[Candidate], formula: Formula, floor: float) -> float | None:
    """Return the least memory of all that reach the floor."""
    found = Known(floor, {c: formula(c) for c in candidates}, {}).feasible.values()
    return min((result.memory_mib or 0.0 for result in found), default=None)


def sampled(sampler: Sampler, start: Candidate, formula: Formula, floor: float) -> Known:
    """Return what is known once a sampler has nothing left to try. Fails if it repeats itself."""
    results, numbers = {start: formula(start)}, {start: 0}
    while (choice := sampler.choose(Known(floor, results, numbers))) is not None:
        assert choice not in results, "measured twice"
        results[choice], numbers[choice] = formula(choice), len(numbers)
    return Known(floor, results, numbers)
