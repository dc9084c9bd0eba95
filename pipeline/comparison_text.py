"""A comparison in words and tables: Markdown, CSV, and an explanation of each row. Pure."""

import csv
import io
from collections.abc import Iterator

from pipeline.comparison import LEDGER, Change, Comparison, Figure, Row
from pipeline.report import ABSENT

_PART_NOISE_MIB = 5.0


def headline(comparison: Comparison) -> str:
    """Return what came out, in a sentence or two."""
    first, candidates = comparison.rows[0], comparison.candidates
    better = [row for row in candidates if row.memory_change and row.memory_change.clear]
    saving = [row for row in better if row.memory_change and row.memory_change.percent < 0]
    if not first.memory:
        return f"The first row, {first.preset}, was not measured, so there is no change to show."
    if not saving:
        return f"No preset takes clearly less memory than {first.preset}."
    best = min(saving, key=lambda row: row.memory.median if row.memory else 0.0)
    at = f" at {change(best.speed_change)} throughput" if best.speed_change else ""
    return (
        f"Least memory: **{best.preset}** with {_memory(best)} MiB, "
        f"{change(best.memory_change)} against {first.preset}{at}."
    )


def change(value: Change | None) -> str:
    """Return a change in percent; one inside the noise is called so."""
    if value is None:
        return ""
    percent = f"{value.percent:+.0f} %" if abs(value.percent) >= 9.5 else f"{value.percent:+.1f} %"
    return percent if value.clear else f"about the same ({percent})"


def table(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return the heads of the columns, and a list of cells for each row."""
    parts = [part for part in LEDGER if any(part in row.ledger for row in comparison.rows)]
    heads = ["preset", "peak MiB", "change", *parts]
    heads += ["samples/s", "change", "final loss"]
    if comparison.reference:
        heads += ["ref. memory", "ref. samples/s"]
    return heads, [_cells(row, parts, bool(comparison.reference)) for row in comparison.rows]


def _cells(row: Row, parts: list[str], with_reference: bool) -> list[str]:
    diverged = " (diverged)" if row.diverged else ""
    cells = [row.preset, _memory(row) + _trouble(row), change(row.memory_change)]
    cells += [f"{row.ledger[part]:,.0f}" if part in row.ledger else ABSENT for part in parts]
    loss = ABSENT if row.final_loss is None else f"{row.final_loss:.4f}"
    cells += [_speed(row.speed), change(row.speed_change), loss + diverged]
    if with_reference:
        given = (row.reference_memory_percent, row.reference_speed_percent)
        cells += [f"{percent:+.0f} %" if percent is not None else "" for percent in given]
    return cells


def _trouble(row: Row) -> str:
    return f" ({row.trouble.partition(':')[0]})" if row.trouble else ""


def _memory(row: Row) -> str:
    if row.memory is None:
        return ABSENT
    spread = row.memory.high - row.memory.low
    around = f" ({row.memory.low:,.0f} to {row.memory.high:,.0f})" if spread >= 1 else ""
    return f"{row.memory.median:,.0f}{around}"


def _speed(figure: Figure | None) -> str:
    if figure is None:
        return ABSENT
    return f"{figure.median:.4g} ({figure.low:.4g} to {figure.high:.4g})"


def explanation(row: Row, first: Row) -> str:
    """Return why a row came out as it did: what its preset does, and what was measured."""
    sentences = [row.why.strip()] if row.why else []
    if row is not first and row.ledger and first.ledger:
        parts = [
            f"{part} {delta:+,.0f} MiB"
            for part in LEDGER
            if part in row.ledger and part in first.ledger
            and abs(delta := row.ledger[part] - first.ledger[part]) >= _PART_NOISE_MIB
        ]  # fmt: skip
        moved = "; ".join(parts) or "no part of the peak moved"
        sentences.append(f"Measured against {first.preset}: {moved}.")
    if row.memory and first.memory and row.memory_change:
        delta = row.memory.median - first.memory.median
        pace = f", throughput {change(row.speed_change)}" if row.speed_change else ""
        sentences.append(f"Peak memory {delta:+,.0f} MiB, {change(row.memory_change)}{pace}.")
    return " ".join(sentences)


def markdown(comparison: Comparison) -> str:
    """Return headline, table and explanations: comparison.md."""
    return "\n".join([headline(comparison), "", *_table(*table(comparison)), *_words(comparison)])


def note(comparison: Comparison) -> str:
    """Return the parent run's note: as comparison.md, with a table that fits its narrow column."""
    heads = ["preset", "peak MiB", "change", "samples/s", "change"]
    rows = [
        [
            row.preset, _memory(row) + _trouble(row), change(row.memory_change),
            f"{row.speed.median:.4g}" if row.speed else ABSENT, change(row.speed_change),
        ]
        for row in comparison.rows
    ]  # fmt: skip
    lines = [headline(comparison), "", *_table(heads, rows)]
    lines.append("Under *Artifacts*: comparison.html with all figures, .png, .md and .csv.\n")
    return "\n".join([*lines, *_words(comparison)])


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    cells = [[cell.replace("|", "/") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *cells)] + [""]


def _words(comparison: Comparison) -> list[str]:
    first = comparison.rows[0]
    told = [f"**{row.preset}**: {explanation(row, first)}\n" for row in comparison.rows]
    return [*(f"- {remark}" for remark in remarks(comparison)), "", *told]


def remarks(comparison: Comparison) -> Iterator[str]:
    """Yield what a reader of the table should know."""
    versions = ", ".join(f"{name} {number}" for name, number in comparison.versions.items())
    yield (
        f"Workload {comparison.workload} on {comparison.device}; {comparison.repeats} "
        f"{'repeat' if comparison.repeats == 1 else 'interleaved repeats'}; {versions}."
    )
    yield (
        "Medians; the interval of samples/s covers the 95 % interval of every repeat. A change is "
        "called about the same where the spreads overlap, or where memory differs by 1 % at most."
    )
    yield from (f"{row.preset}: {row.trouble}." for row in comparison.rows if row.trouble)
    if comparison.interrupted:
        yield "Interrupted: later trainings are missing."
    if len({row.source for row in comparison.rows if row.source}) > 1:
        yield "Rows whose memory was read in another way than the first row's are not compared."
    if comparison.reference:
        yield f"ref.: change against its own first row, by {comparison.reference}."


def csv_text(comparison: Comparison) -> str:
    """Return one line a row, with plain numbers; what was not measured is empty."""
    sink = io.StringIO()
    writer = csv.DictWriter(sink, list(_record(comparison.rows[0])), lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(_record, comparison.rows))
    return sink.getvalue()


def _record(row: Row) -> dict[str, str | int | float | None]:
    values: dict[str, str | int | float | None] = {"preset": row.preset, "completed": row.repeats}
    for name, figure in (("peak_memory_mib", row.memory), ("samples_per_second", row.speed)):
        for key in ("median", "low", "high"):
            suffix = "" if key == "median" else f"_{key}"
            values[name + suffix] = round(getattr(figure, key), 3) if figure else None
    for name, value in (("memory", row.memory_change), ("throughput", row.speed_change)):
        values[f"{name}_change_percent"] = round(value.percent, 2) if value else None
        values[f"{name}_change_is_clear"] = str(value.clear).lower() if value else None
    values |= {f"{part}_mib": row.ledger.get(part) for part in LEDGER}
    values |= {
        "final_loss": row.final_loss,
        "diverged": str(row.diverged).lower(),
        "reference_memory_percent": row.reference_memory_percent,
        "reference_throughput_percent": row.reference_speed_percent,
        "trouble": row.trouble,
        "runs": " ".join(row.run_ids),
    }
    return values
