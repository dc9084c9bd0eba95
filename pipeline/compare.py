"""Presets on one workload, each a child run, and what comes of setting them side by side."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from pipeline.comparison import Comparison, Measured, compared, last_loss, thinned
from pipeline.comparison_figure import comparison_figure
from pipeline.comparison_page import comparison_page
from pipeline.comparison_text import csv_text, markdown, note
from pipeline.config import RunConfig
from pipeline.errors import Interrupted
from pipeline.handover import hand_over
from pipeline.presets import Ladder
from pipeline.run import Ran, Runner, runner
from pipeline.tracking import parent_run, where_to_look
from pipeline.writer import RunWriter


class Compared(NamedTuple):
    """A comparison, and what of it is not in MLflow."""

    comparison: Comparison
    unlogged: Sequence[str]


def compare(
    ladder: Ladder, configs: Sequence[RunConfig], repeats: int, console: Console
) -> Compared:
    """Train every row of the ladder `repeats` times, as children of one MLflow run.

    Repeats are interleaved (A B C A B C), so that drift favours no row. An interrupt ends it in
    order, with what is known by then. Raises TrackingError where the server does not answer.
    """
    workload = configs[0].workload_name
    results: list[Compared] = []
    with runner(console) as trainings:
        params = {
            "compare.presets": ",".join(ladder.presets),
            "compare.repeats": repeats,
            "compare.workload": workload,
        }
        title = f"compare {ladder.name} on {workload}"
        try:
            with parent_run(trainings.client, title, params) as parent:
                rows: list[list[Measured]] = [[] for _ in configs]
                unlogged: list[str] = []
                stopped = _train(trainings, configs, repeats, console, rows, unlogged)
                comparison = compared(ladder, rows, workload, repeats=repeats, stopped=stopped)
                unlogged += hand_over(
                    partial(write_comparison, comparison, rows),
                    partial(_log, parent, comparison),
                    parent.run_id,
                )
                results.append(Compared(comparison, unlogged))
                where = where_to_look(parent.run_id, parent.experiment_id)
                console.print(f"see {where}", soft_wrap=True)
                if comparison.interrupted:
                    raise Interrupted("after the training that was under way")
        except Interrupted:
            if not results:
                raise
    return results[0]


def _train(
    trainings: Runner,
    configs: Sequence[RunConfig],
    repeats: int,
    console: Console,
    rows: list[list[Measured]],
    unlogged: list[str],
) -> bool:
    """Fill the rows; return whether an interrupt came, between two trainings or in one."""
    try:
        for repeat in range(1, repeats + 1):
            for row, config in zip(rows, configs, strict=True):
                which = f" ({repeat} of {repeats})" if repeats > 1 else ""
                name = f"{config.preset.name}{which}"
                console.print(f"\n{name}", style="bold", highlight=False)
                tags = {"compare.row": config.preset.name, "compare.repeat": str(repeat)}
                ran = trainings.run(config, name, tags)
                row.append(_measured(ran))
                unlogged += ran.unlogged
                if ran.launched.record.interrupted:
                    return True
    except Interrupted:
        return True
    return False


def _measured(ran: Ran) -> Measured:
    record, recorder, _ = ran.launched
    logged = [event.values for event in recorder.logged]
    final = last_loss(logged)
    final = record.metrics.get("train_loss") if final is None else final
    return Measured(ran.run_id, record, recorder.samples, final)


def write_comparison(
    comparison: Comparison, rows: Sequence[Sequence[Measured]], folder: Path
) -> None:
    """Write table, words and figures into this folder."""
    curves = [thinned(runs[0].curve) if runs else [] for runs in rows]
    (folder / "comparison.csv").write_text(csv_text(comparison), encoding="utf-8")
    (folder / "comparison.md").write_text(markdown(comparison), encoding="utf-8")
    (folder / "comparison.json").write_text(comparison.model_dump_json(indent=2) + "\n")
    comparison_page(comparison, curves, folder / "comparison.html")
    comparison_figure(comparison, curves, folder / "comparison.png")


def _log(parent: RunWriter, comparison: Comparison, folder: Path | None) -> None:
    parent.tag({"outcome": "failed" if comparison.interrupted else "completed"})
    parent.note(note(comparison))
    if comparison.candidates:
        best = min(comparison.candidates, key=lambda row: row.memory.median if row.memory else 0.0)
        parent.tag({"compare.least_memory": best.preset})
        assert best.memory
        assert best.speed
        parent.summary(
            {
                "best/peak_memory_mib": best.memory.median,
                "best/samples_per_second": best.speed.median,
            },
            time.time(),
        )
    if folder:
        parent.artifacts(folder)
