"""What a study says: rows for tables and figures, and the answer in words. Pure."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence

from pipeline.config import Frozen
from pipeline.record import Outcome
from pipeline.search.jobs import Entry, Plan
from pipeline.search.judge import FAILURES, Measured, Verdict, verdict
from pipeline.search.monotone import Inferred, Known
from pipeline.search.space import Candidate


class Row(Frozen):
    """One configuration measured, or inferred, in a study."""

    trial: int | None
    """None where it was inferred."""
    role: str
    configuration: str
    micro_batch: int
    accumulation: int
    verdict: str
    outcome: Outcome | None = None
    peak_memory_mib: float | None = None
    samples_per_second: float | None = None
    samples_per_second_low: float | None = None
    samples_per_second_high: float | None = None
    steps: int | None = None
    seconds: float | None = None
    asked_mib: float | None = None
    follows_from: int | None = None
    reason: str = ""
    run_id: str = ""


class Answer(Frozen):
    """What a search found, so far or for good."""

    study: str
    min_throughput: str
    floor: float | None
    """Samples per second; None as long as the start is not measured."""
    start: Row | None
    best: Row | None
    """The winner, with the figures of its confirmation if that was made; None: nothing reaches."""
    nearest: Row | None
    """Where nothing reaches the floor: the fastest."""
    confirmed: bool
    complete: bool
    """Whether every configuration of the space was measured or inferred."""
    measured: int
    inferred: int
    failed: int
    left: int
    seconds: float
    """Of all trainings together."""
    rows: tuple[Row, ...]

    @property
    def start_failed(self) -> bool:
        """Whether the floor, a share of the start's throughput, can never be known."""
        return self.start is not None and self.floor is None


def answer(
    study: str,
    floor_text: str,
    plan: Plan,
    candidates: Sequence[Candidate],
    entries: Sequence[Entry],
) -> Answer:
    """Return what a study says at this moment."""
    known = plan.known(entries)
    inferred: Mapping[Candidate, Inferred] = plan.sampler.inferred(known) if known else {}
    done = [(entry, entry.measured) for entry in entries if entry.measured]
    floor = known.floor if known else None
    rows = [_measured_row(entry, result, floor) for entry, result in done]
    tried = {entry.job.candidate: result for entry, result in done}
    rows += [_inferred_row(candidate, found) for candidate, found in inferred.items()]
    left = [c for c in candidates if c not in tried and c not in inferred]
    best = known.best if known else None
    confirmed = known is not None and best in known.confirmed
    start = plan.start_measured(entries)
    return Answer(
        study=study,
        min_throughput=floor_text,
        floor=floor,
        start=_row_of("start", plan.start, start, floor, 0) if start else None,
        best=_best_row(known, best, "confirm" if confirmed else "trial"),
        nearest=_nearest(rows) if best is None else None,
        confirmed=confirmed,
        complete=bool(known) and not left,
        measured=len(tried),
        inferred=len(inferred),
        failed=sum(_failed(result) for result in tried.values()),
        left=len(left),
        seconds=sum(result.seconds for _, result in done),
        rows=tuple(rows),
    )


def _failed(result: Measured) -> bool:
    return verdict(result, 0.0) in FAILURES


def _best_row(known: Known | None, best: Candidate | None, role: str) -> Row | None:
    if known is None or best is None:
        return None
    return _row_of(role, best, known.results[best], known.floor, known.numbers[best])


def _nearest(rows: Sequence[Row]) -> Row | None:
    timed = [row for row in rows if row.samples_per_second is not None]
    return max(timed, key=lambda row: row.samples_per_second or 0.0, default=None)


def _measured_row(entry: Entry, result: Measured, floor: float | None) -> Row:
    return _row_of(entry.job.role, entry.job.candidate, result, floor, entry.number)


def _row_of(
    role: str, candidate: Candidate, result: Measured, floor: float | None, number: int
) -> Row:
    return Row(
        trial=number,
        role=role,
        configuration=candidate.key,
        micro_batch=candidate.micro_batch,
        accumulation=candidate.accumulation,
        verdict=verdict(result, floor or 0.0).value,
        outcome=result.outcome,
        peak_memory_mib=result.memory_mib,
        samples_per_second=result.speed,
        samples_per_second_low=result.speed_low,
        samples_per_second_high=result.speed_high,
        steps=result.steps,
        seconds=result.seconds,
        asked_mib=result.asked_mib,
        reason=result.message,
        run_id=result.run_id,
    )


def _inferred_row(candidate: Candidate, found: Inferred) -> Row:
    return Row(
        trial=None,
        role="inferred",
        configuration=candidate.key,
        micro_batch=candidate.micro_batch,
        accumulation=candidate.accumulation,
        verdict=found.verdict.value,
        follows_from=found.follows_from,
        reason=found.reason,
    )


def trials_csv(rows: Sequence[Row]) -> str:
    """Return the rows as a table, one column per field, empty where there is no figure."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(Row.model_fields), lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.model_dump(mode="json") for row in rows)
    return text.getvalue()


def figures(row: Row) -> str:
    """Return what a configuration takes and reaches."""
    memory = "-" if row.peak_memory_mib is None else f"{row.peak_memory_mib:,.0f} MiB"
    speed = row.samples_per_second
    return memory if speed is None else f"{memory} at {speed:.4g} samples/s"


def line(row: Row, best: Row | None) -> str:
    """Return a trial as a line of progress."""
    where = f" after {row.steps} steps" if row.steps else ""
    asked = f", asking for {row.asked_mib:,.0f} MiB" if row.asked_mib else ""
    failed = row.outcome is not Outcome.COMPLETED
    result = f"{row.verdict}{where}{asked}" if failed else row.verdict
    so_far = f"   best so far: {best.configuration}, {figures(best)}" if best else ""
    return f"{row.trial:>3} {row.role:<7} {row.configuration}: {figures(row)}, {result}{so_far}"


def sentences(found: Answer) -> Iterator[str]:
    """Yield the answer in words."""
    best, start, floor = found.best, found.start, found.floor
    if start is None:
        yield "The start was not measured to the end, so the floor is not known."
        return
    if floor is None:
        yield (
            f"The start does not train here ({start.verdict}), so {found.min_throughput} of its "
            "throughput is unknown: use samples per second, or another preset."
        )
        return
    if best is not None:
        state = "confirmed in a fresh process" if found.confirmed else "not confirmed yet"
        yield f"Least memory: {best.configuration}, {figures(best)} ({state})."
        yield from _savings(best, start, floor)
    elif found.complete:
        yield f"Nothing reaches the floor of {floor:.4g} samples/s."
    else:
        yield f"Nothing that was tried reaches the floor of {floor:.4g} samples/s."
    near = found.nearest
    if near and near.samples_per_second:
        missing = 1 - near.samples_per_second / floor
        yield f"Nearest came {near.configuration}: {figures(near)}, {missing:.1%} below."
    rest = f", {found.left} left to try" if found.left else ""
    yield (
        f"{found.measured} configurations measured ({found.failed} of them failed), "
        f"{found.inferred} inferred{rest}; {found.seconds:.0f} s of training."
    )


def _savings(best: Row, start: Row, floor: float) -> Iterator[str]:
    if best.peak_memory_mib and start.peak_memory_mib:
        change = best.peak_memory_mib / start.peak_memory_mib - 1
        same = best.configuration == start.configuration
        yield (
            "That is the start itself: nothing takes less memory and is fast enough."
            if same
            else f"That is {change:+.1%} of memory against the start ({start.configuration}, "
            f"{figures(start)})."
        )
    if best.samples_per_second and floor:
        margin = best.samples_per_second / floor - 1
        yield f"Its throughput is {margin:+.1%} against the floor of {floor:.4g} samples/s."


def pareto(rows: Sequence[Row]) -> list[Row]:
    """Return the configurations that none beats in both, the least memory first."""
    timed = [r for r in rows if r.peak_memory_mib and r.samples_per_second and not _bad(r)]
    front: list[Row] = []
    for row in sorted(timed, key=lambda r: (r.peak_memory_mib or 0, -(r.samples_per_second or 0))):
        if not front or (row.samples_per_second or 0) > (front[-1].samples_per_second or 0):
            front.append(row)
    return front


def _bad(row: Row) -> bool:
    return row.verdict in FAILURES or row.role == "inferred"


def is_feasible(row: Row) -> bool:
    """Return whether a measured row reaches the floor."""
    return row.verdict == Verdict.FEASIBLE and row.role != "inferred"
