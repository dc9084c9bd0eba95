"""What a study holds, and what is to be done next. Pure: knows neither Optuna nor MLflow."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pipeline.search.judge import Floor, Measured, Verdict, pooled, verdict
from pipeline.search.monotone import Known
from pipeline.search.sampler import Sampler
from pipeline.search.space import Candidate

START_REPEATS = 3
Role = Literal["start", "trial", "confirm"]


class Job(NamedTuple):
    """One training of a search."""

    role: Role
    candidate: Candidate
    repeat: int = 1

    @property
    def key(self) -> str:
        """What names it in a study: no key is measured twice."""
        repeat = f" {self.repeat}" if self.role == "start" else ""
        return f"{self.role}{repeat}: {self.candidate.key}"


class Entry(NamedTuple):
    """A job that somebody does (no result yet) or has done."""

    number: int
    job: Job
    measured: Measured | None


class Wait(NamedTuple):
    """Somebody else is about to find out what is needed."""


class Plan:
    """Decides what to do next in one study."""

    def __init__(self, start: Candidate, floor: Floor, sampler: Sampler) -> None:
        self.start = start
        self.floor = floor
        self.sampler = sampler
        self._repeats = START_REPEATS if floor.is_share else 1

    def start_measured(self, entries: Sequence[Entry]) -> Measured | None:
        """Return the start's figures once all of its repeats are there, or one has failed."""
        own = [entry.measured for entry in entries if entry.job.role == "start"]
        done = [one for one in own if one is not None]
        failed = [one for one in done if verdict(one, 0.0) is not Verdict.FEASIBLE]
        return pooled(done) if failed or len(done) >= self._repeats else None

    def known(self, entries: Sequence[Entry]) -> Known | None:
        """Return what the study knows; None as long as the floor is not known."""
        start = self.start_measured(entries)
        floor = self.floor.samples_per_second(start)
        if start is None or floor is None:
            return None
        results = {self.start: start}
        numbers = {e.job.candidate: e.number for e in reversed(entries) if e.job.role == "start"}
        taken, confirmed = set(), set()
        for role in ("trial", "confirm"):  # a confirmation says more than the trial before it
            for entry in entries:
                candidate = entry.job.candidate
                if entry.job.role == role and entry.measured is None:
                    taken |= {candidate} if role == "trial" else set()
                elif entry.job.role == role and entry.measured is not None:
                    results[candidate] = _merged(results.get(candidate), entry.measured, floor)
                    numbers.setdefault(candidate, entry.number)
                    confirmed |= {candidate} if role == "confirm" else set()
        return Known(floor, results, numbers, frozenset(taken), frozenset(confirmed))

    def next_job(self, entries: Sequence[Entry], *, may_try: bool) -> Job | Wait | None:
        """Return what to do next; None once the study has its answer.

        With `may_try` false no further configuration is tried, only what is needed to answer.
        """
        start = self.start_measured(entries)
        if start is None:
            return self._next_start(entries)
        known = self.known(entries)
        if known is None:  # the start failed, and the floor was a share of its speed
            return None
        candidate = self.sampler.choose(known) if may_try else None
        if candidate is not None:
            return Job("trial", candidate)
        if known.taken and may_try:
            return Wait()
        best = known.best
        if best is None or best in known.confirmed:
            return None
        job = Job("confirm", best)
        return Wait() if any(entry.job == job for entry in entries) else job

    def _next_start(self, entries: Sequence[Entry]) -> Job | Wait:
        begun = {entry.job.repeat for entry in entries if entry.job.role == "start"}
        left = [n for n in range(1, self._repeats + 1) if n not in begun]
        return Job("start", self.start, left[0]) if left else Wait()


def _merged(before: Measured | None, after: Measured, floor: float) -> Measured:
    """Return the later result, with the earlier speed where its epoch was too short to time."""
    if before is None or verdict(after, floor) is not Verdict.NOT_TIMED:
        return after
    speeds = before.model_dump(include={"speed", "speed_low", "speed_high"})
    return after.model_copy(update=speeds)
