"""The search itself: plan, claim, measure, record, until the study has its answer."""

import math
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from pipeline import processes
from pipeline.config import Measurement, RunConfig, Workload
from pipeline.errors import Interrupted, PipelineError
from pipeline.record import Outcome, RunRecord
from pipeline.search.jobs import Entry, Job, Plan, Wait
from pipeline.search.judge import EQUAL_MEMORY, Floor, measured
from pipeline.search.monotone import Known
from pipeline.search.study import Claim, Study
from pipeline.throughput import MIN_TIMED_STEPS

TRIAL_STEPS = 40
"""At most so many steps of a trial that stays close to the floor; most need about ten."""
START_STEPS = 12
"""At most so many of each repeat of the start: runs differ by more than the steps of one."""
_LOOK_AGAIN_SECONDS = 0.5


class StoppedError(PipelineError):
    """A training failed for a reason that says nothing about its memory or speed."""


class Trained(NamedTuple):
    """What a training of the search came to."""

    record: RunRecord
    run_id: str
    is_crash: bool
    """The process died; otherwise a failure is an exception that the training raised."""


class Measure(Protocol):
    """Runs one training and keeps it as one MLflow run."""

    def __call__(self, config: RunConfig, *, name: str, tags: dict[str, str]) -> Trained:
        """Return what it came to, whatever that was."""


class Limits(NamedTuple):
    """When to try no further configuration; what is needed for an answer is measured still."""

    trials: int | None = None
    deadline: float | None = None
    """time.monotonic() at the end."""


class Search:
    """Goes on with a study until it has its answer or a limit is reached."""

    def __init__(
        self,
        start: RunConfig,
        plan: Plan,
        study: Study,
        measure: Measure,
        on_result: Callable[[Entry], None],
    ) -> None:
        self._start = start
        self._plan = plan
        self._study = study
        self._measure = measure
        self._on_result = on_result
        self.tried = 0
        """Configurations measured by this process."""

    def run(self, limits: Limits) -> None:
        """Measure until there is nothing left to do. Raises Interrupted and StoppedError."""
        device = f"{self._start.measurement.device} of this machine is measured on"
        while True:
            # Two trainings at once on one device would measure each other.
            with processes.one_at_a_time(device):
                self._study.free_stale()
                entries = self._study.entries()
                job = self._plan.next_job(entries, may_try=self._may_try(limits))
                if job is None:
                    return
                if isinstance(job, Job):
                    self._do(job, self._plan.known(entries))
            if isinstance(job, Wait):
                time.sleep(_LOOK_AGAIN_SECONDS)

    def _may_try(self, limits: Limits) -> bool:
        late = limits.deadline is not None and time.monotonic() > limits.deadline
        return not late and (limits.trials is None or self.tried < limits.trials)

    def _do(self, job: Job, known: Known | None) -> None:
        with self._study.claimed(job) as claim:
            if claim is None:  # another process does it
                return
            trained = self._trained(claim, known)
            record = trained.record
            if record.interrupted:
                raise Interrupted(record.message.removeprefix("interrupted: "))
            if record.outcome is Outcome.FAILED and not trained.is_crash:
                raise StoppedError(f"trial {claim.number} ({job.candidate.key}): {record.message}")
            result = measured(record, trained.run_id)
            with processes.interrupts_put_off():
                self._study.finish(claim, result, self._floor(known, result.speed))
                self.tried += job.role == "trial"
                self._on_result(Entry(claim.number, job, result))

    def _trained(self, claim: Claim, known: Known | None) -> Trained:
        job = claim.job
        return self._measure(
            training(self._start, job, self._plan.floor, known),
            name=f"{claim.number} {job.key}",
            tags={
                "study.name": self._study.name,
                "trial.number": str(claim.number),
                "trial.role": job.role,
            },
        )

    def _floor(self, known: Known | None, speed: float | None) -> float:
        """Return the floor; of the start, which is measured to find it, its own share."""
        if known is not None:
            return known.floor
        floor = self._plan.floor
        return floor.value * (speed or 0.0) if floor.is_share else floor.value


def training(start: RunConfig, job: Job, floor: Floor, known: Known | None) -> RunConfig:
    """Return the training of a job: short, and as short as may be, unless it has to confirm."""
    config = job.candidate.applied(start)
    workload, own = config.workload, config.measurement
    least = own.warmup_steps + 2 * MIN_TIMED_STEPS
    values = own.model_dump() | {"measure": "full", "floor": None, "ceiling_mib": None}
    if job.role == "confirm":
        short = workload.max_steps is None and _epoch_steps(config) < least
        steps = least if short else workload.max_steps
    else:
        best = known.best_mib if known else None
        values |= {
            "measure": "adaptive",
            "floor": known.floor if known else None if floor.is_share else floor.value or None,
            "ceiling_mib": best * (1 + EQUAL_MEMORY) if best else None,
        }
        limit = START_STEPS if job.role == "start" else TRIAL_STEPS
        steps = min(workload.max_steps or limit, limit)
    return config.model_copy(
        update={
            "workload": Workload.model_validate(workload.model_dump() | {"max_steps": steps}),
            "measurement": Measurement.model_validate(values),
        }
    )


def _epoch_steps(config: RunConfig) -> int:
    """Return at most how many steps the training has."""
    workload = config.workload
    return math.ceil(workload.samples * workload.epochs / config.training.effective_batch)
