"""The command line: options from the configuration's fields, errors to exit codes."""

import os
import sys
from collections.abc import Sequence
from json import dumps
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline import processes
from pipeline.comparison import Comparison
from pipeline.comparison_text import headline, table
from pipeline.comparison_text import remarks as comparison_remarks
from pipeline.config import DEFAULT_LADDER, DEFAULT_PRESET, DEFAULT_WORKLOAD
from pipeline.errors import ConfigError, Interrupted, TrackingError
from pipeline.options import (
    BAD_INPUT,
    INTERRUPTED,
    LENIENT,
    NOT_COMPLETED,
    NOT_LOGGED,
    TO_MEND,
    configurations,
    with_settings,
)
from pipeline.prediction import NoPrediction, predicted, promise
from pipeline.presets import ladder
from pipeline.record import Outcome, RunRecord
from pipeline.report import remarks, rows, verdict
from pipeline.search.cli import search_command

app = typer.Typer(
    help="Measure what training optimizations do to memory and throughput.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# Without markup: messages and paths may hold brackets.
console = Console(stderr=True, markup=False)


@app.command("run", context_settings=LENIENT)
@with_settings
def run_command(
    *,
    context: typer.Context,
    settings: dict[str, str],
    preset: Annotated[
        str, typer.Option(help="name, file, or several joined by +")
    ] = DEFAULT_PRESET,
    workload: Annotated[str, typer.Option(help="name, file or auto")] = DEFAULT_WORKLOAD,
    json: Annotated[bool, typer.Option("--json", help="print the record as JSON")] = False,
) -> None:
    """Measure one training, as one MLflow run."""
    [config] = configurations([preset], workload, settings, context.args, console)
    from pipeline.run import run  # imports MLflow: not before the input is known to be good

    ran = run(config, console)
    record = ran.launched.record
    if json:
        sys.stdout.write(record.model_dump_json(indent=2) + "\n")
    _show(record)
    for problem in ran.unlogged:
        _print_error(problem)
    if record.interrupted:
        raise typer.Exit(INTERRUPTED)
    if record.outcome is not Outcome.COMPLETED:
        raise typer.Exit(NOT_COMPLETED)
    raise typer.Exit(NOT_LOGGED if ran.unlogged else 0)


def _show(record: RunRecord) -> None:
    table = Table(show_header=False, title=verdict(record), title_justify="left")
    for name, value in rows(record):
        table.add_row(name, value)
    console.print(table)
    for remark in remarks(record):
        console.print(f"note: {remark}", highlight=False, soft_wrap=True)


@app.command("compare", context_settings=LENIENT)
@with_settings
def compare_command(
    *,
    context: typer.Context,
    settings: dict[str, str],
    presets: Annotated[
        str, typer.Option(help="a ladder (article, isolated, a file), or presets joined by commas")
    ] = DEFAULT_LADDER,
    workload: Annotated[str, typer.Option(help="name, file or auto")] = DEFAULT_WORKLOAD,
    repeats: Annotated[int, typer.Option(min=1, help="trainings of each preset, interleaved")] = 3,
    json: Annotated[bool, typer.Option("--json", help="print the comparison as JSON")] = False,
) -> None:
    """Measure several presets on one workload, and set them side by side."""
    rungs = ladder(presets)
    configs = configurations(rungs.presets, workload, settings, context.args, console)
    from pipeline.compare import compare  # imports MLflow

    comparison, unlogged = compare(rungs, configs, repeats, console)
    if json:
        sys.stdout.write(comparison.model_dump_json(indent=2) + "\n")
    _show_comparison(comparison)
    for problem in unlogged:
        _print_error(problem)
    if comparison.interrupted:
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(NOT_LOGGED if unlogged else 0)


def _show_comparison(comparison: Comparison) -> None:
    heads, cells = table(comparison)
    shown = Table(*heads)
    for row in cells:
        shown.add_row(*row)
    console.print(shown)
    console.print(headline(comparison).replace("**", ""), soft_wrap=True, highlight=False)
    for remark in comparison_remarks(comparison):
        console.print(f"note: {remark}", highlight=False, soft_wrap=True)


app.command("search", context_settings=LENIENT)(search_command)


@app.command("estimate", context_settings=LENIENT)
@with_settings
def estimate_command(
    *,
    context: typer.Context,
    settings: dict[str, str],
    preset: Annotated[
        str, typer.Option(help="name, file, or several joined by +")
    ] = DEFAULT_PRESET,
    workload: Annotated[str, typer.Option(help="name, file or auto")] = DEFAULT_WORKLOAD,
    json: Annotated[bool, typer.Option("--json", help="print the prediction as JSON")] = False,
) -> None:
    """Predict the peak memory of a training on a GPU, without one.

    Here `device` names the card: h200, a100-40, rtx3080, ...
    """
    from pipeline.estimate import (  # with its statistics: help is to come at once
        predict,
        which_card,
    )
    from pipeline.launcher import Launcher

    card, why = which_card(settings.pop("device", "auto"))
    if why:
        console.print(why, highlight=False, soft_wrap=True)
    on_gpu = settings | {"device": "cuda"}
    [config] = configurations([preset], workload, on_gpu, context.args, console)
    with Launcher() as launcher:
        [prediction] = predict(launcher, [config], card)
    if json:
        sys.stdout.write(dumps(prediction.document(), indent=2) + "\n")
    if isinstance(prediction, NoPrediction):
        _print_error(f"no prediction: {prediction.reason}")
        raise typer.Exit(NOT_COMPLETED)
    shown = Table(show_header=False, title=promise(config, prediction), title_justify="left")
    for name, value in predicted(prediction):
        shown.add_row(name, value)
    console.print(shown)
    for words in prediction.not_covered:
        console.print(f"not covered: {words}", highlight=False, soft_wrap=True)


@app.command("doctor")
def doctor_command(
    *, json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False
) -> None:
    """Say what this machine has and lacks."""
    from pipeline.doctor import examine

    findings = list(examine())
    if json:
        sys.stdout.write(dumps([finding._asdict() for finding in findings], indent=2) + "\n")
    table = Table(show_header=False)
    for name, found, good in findings:
        table.add_row(name, found, Text("ok") if good else Text("to mend", "red"))
    (console if json else Console()).print(table)
    raise typer.Exit(0 if all(finding.ok for finding in findings) else TO_MEND)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    processes.raise_interrupts()
    try:
        above = processes.mlflow_above()
        if above:
            processes.end_with(above)
        app(args=list(arguments) if arguments is not None else None)
    except ConfigError as error:
        for problem in error.problems:
            _print_error(problem)
        sys.exit(BAD_INPUT)
    except TrackingError as error:
        _print_error(str(error))
        sys.exit(BAD_INPUT)
    except (Interrupted, KeyboardInterrupt) as error:
        console.print(f"interrupted: {error}")
        if "MLFLOW_RUN_ID" in os.environ:  # still there: nobody opened the run of `mlflow run`
            from pipeline.tracking import end_unopened_run

            end_unopened_run(f"interrupted: {error}")
        sys.exit(INTERRUPTED)


def _print_error(text: str) -> None:
    console.print(Text.assemble(("error:", "red"), " ", text), soft_wrap=True)
