"""Records of several presets set against the first: medians, spread, changes. Pure data."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from pipeline.config import Frozen
from pipeline.presets import Ladder
from pipeline.record import MIB, MemorySample, Outcome, RunRecord

LEDGER = ("weights", "gradients", "optimizer", "activations", "unused", "context")
"""The parts of the peak, bottom to top, as they are called after `ledger/` and before `_mib`."""
_MEMORY_NOISE_PERCENT = 1.0


class Measured(NamedTuple):
    """One training of a row."""

    run_id: str
    record: RunRecord
    curve: Sequence[MemorySample] = ()
    final_loss: float | None = None


class Figure(Frozen):
    """A figure of a row: the median over its repeats, and the ends of their spread."""

    median: float
    low: float
    high: float

    def overlaps(self, other: "Figure") -> bool:
        """Return whether the two spreads share a value."""
        return self.low <= other.high and other.low <= self.high


class Change(Frozen):
    """How a figure differs from the first row's."""

    percent: float
    clear: bool
    """Whether it is more than the repeats differ among themselves."""


class Row(Frozen):
    """One preset: what was measured, and what it changes against the first row."""

    preset: str
    summary: str
    why: str
    run_ids: tuple[str, ...]
    repeats: int
    """How many of its trainings completed."""
    trouble: str = ""
    """Why others did not."""
    diverged: bool = False
    source: str | None = None
    memory: Figure | None = None
    """Peak memory, MiB."""
    speed: Figure | None = None
    """Samples per second; the spread covers the 95 % interval of every repeat."""
    ledger: Mapping[str, float] = {}
    """The parts of the peak, MiB; empty where they are not known."""
    final_loss: float | None = None
    memory_change: Change | None = None
    speed_change: Change | None = None
    reference_memory_percent: float | None = None
    reference_speed_percent: float | None = None


class Comparison(Frozen):
    """The rows of a ladder on one workload."""

    ladder: str
    workload: str
    device: str
    repeats: int
    versions: Mapping[str, str]
    rows: tuple[Row, ...]
    reference: str | None = None
    """Where the figures come from that stand beside ours."""
    interrupted: bool = False

    @property
    def candidates(self) -> list[Row]:
        """The rows that can be best: measured, not diverged, by the same kind of reading."""
        source = next((row.source for row in self.rows if row.memory), None)
        return [
            row for row in self.rows
            if row.memory and row.speed and not row.diverged and row.source == source
        ]  # fmt: skip


def compared(
    ladder: Ladder,
    trainings: Sequence[Sequence[Measured]],
    workload: str,
    *,
    repeats: int,
    stopped: bool = False,
) -> Comparison:
    """Set the rows of a ladder against the first; `trainings[i]` are the repeats of row i."""
    rows = [_row(name, runs) for name, runs in zip(ladder.presets, trainings, strict=True)]
    records = [run.record for runs in trainings for run in runs]
    devices = dict.fromkeys(record.device.name for record in records if record.device)
    return Comparison(
        ladder=ladder.name,
        workload=workload,
        device=", ".join(devices) or "unknown device",
        repeats=repeats,
        versions=next((record.versions for record in records if record.versions), {}),
        rows=tuple(_against(rows[0], row, *pair) for row, pair in _with_reference(ladder, rows)),
        reference=ladder.reference.source if ladder.reference else None,
        interrupted=stopped,
    )


def _row(name: str, runs: Sequence[Measured]) -> Row:
    done = [run for run in runs if run.record.outcome is Outcome.COMPLETED]
    failed = [run.record for run in runs if run.record.outcome is not Outcome.COMPLETED]
    losses = [run.final_loss for run in done if run.final_loss is not None]
    label = runs[0].record.config.preset if runs else None
    sources = {run.record.memory_source for run in done}
    return Row(
        preset=label.name if label else name,
        summary=label.summary if label else "",
        why=label.why if label else "",
        run_ids=tuple(run.run_id for run in runs),
        repeats=len(done),
        trouble=_trouble(failed) if runs else "not measured",
        diverged=any(run.record.diverged for run in done),
        source=sources.pop() if len(sources) == 1 else None,
        memory=_figure(done, "peak_memory_mib", "peak_memory_mib", "peak_memory_mib"),
        speed=_figure(
            done, "samples_per_second", "samples_per_second_low", "samples_per_second_high"
        ),
        ledger=_ledger(done),
        final_loss=median(losses) if losses else None,
    )


def _trouble(failed: Sequence[RunRecord]) -> str:
    if not failed:
        return ""
    record = failed[0]
    what = "interrupted" if record.interrupted else record.outcome.value.replace("_", " ")
    return f"{what}: {record.message}" if record.message and not record.interrupted else what


def _figure(runs: Sequence[Measured], middle: str, low: str, high: str) -> Figure | None:
    found = [run.record.metrics for run in runs if middle in run.record.metrics]
    if not found:
        return None
    return Figure(
        median=median(metrics[middle] for metrics in found),
        low=min(metrics[low] for metrics in found),
        high=max(metrics[high] for metrics in found),
    )


def _ledger(runs: Sequence[Measured]) -> dict[str, float]:
    """Return the parts of the training with the median peak, so that they sum to a real one."""
    whole = [run.record.metrics for run in runs if "ledger/weights_mib" in run.record.metrics]
    if not whole:
        return {}
    whole.sort(key=lambda metrics: metrics["peak_memory_mib"])
    metrics = whole[(len(whole) - 1) // 2]
    keys = {part: f"ledger/{part}_mib" for part in LEDGER}
    return {part: metrics[key] for part, key in keys.items() if key in metrics}


def _with_reference(
    ladder: Ladder, rows: Sequence[Row]
) -> Iterator[tuple[Row, tuple[float | None, float | None]]]:
    for index, row in enumerate(rows):
        if ladder.reference is None or index == 0:
            yield row, (None, None)
        else:
            memory, speed = ladder.reference.memory_mib, ladder.reference.samples_per_second
            yield row, (_percent(memory[index], memory[0]), _percent(speed[index], speed[0]))


def _against(first: Row, row: Row, memory: float | None, speed: float | None) -> Row:
    changes = {
        "memory_change": _change(first.memory, row.memory, _MEMORY_NOISE_PERCENT),
        "speed_change": _change(first.speed, row.speed, 0.0),
        "reference_memory_percent": memory,
        "reference_speed_percent": speed,
    }
    if row is first or row.source != first.source:  # a CPU's figures say nothing of a GPU's
        changes |= {"memory_change": None, "speed_change": None}
    return row.model_copy(update=changes)


def _change(first: Figure | None, now: Figure | None, noise_percent: float) -> Change | None:
    if first is None or now is None:
        return None
    percent = _percent(now.median, first.median)
    return Change(percent=percent, clear=abs(percent) > noise_percent and not now.overlaps(first))


def _percent(value: float, first: float) -> float:
    return (value / first - 1) * 100


def last_loss(logged: Sequence[Mapping[str, float]]) -> float | None:
    """Return the loss that was logged last, if any was."""
    losses = [values["loss"] for values in logged if "loss" in values]
    return losses[-1] if losses else None


def thinned(samples: Sequence[MemorySample], points: int = 300) -> list[tuple[float, float]]:
    """Return (second, MiB) of the highest reading of each of so many stretches of time."""
    readings = [(s.seconds, s.process / MIB) for s in samples if s.process is not None]
    if len(readings) <= points:
        return readings
    end = readings[-1][0] or 1.0
    best: dict[int, tuple[float, float]] = {}
    for reading in readings:
        stretch = int(reading[0] / end * points)
        if stretch not in best or reading[1] > best[stretch][1]:
            best[stretch] = reading
    return [best[stretch] for stretch in sorted(best)]
