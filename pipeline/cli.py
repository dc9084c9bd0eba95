"""The command line: options from the configuration's fields, errors to exit codes."""

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from json import dumps
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pipeline import processes
from pipeline.config import DEFAULT_PRESET, DEFAULT_WORKLOAD, FIELDS, GROUPS, RunConfig
from pipeline.errors import ConfigError, Interrupted, TrackingError
from pipeline.preflight import default_workload, look, why_no_gpu, with_device
from pipeline.presets import asked_for, resolve
from pipeline.record import Outcome, RunRecord
from pipeline.report import remarks, rows, verdict

TO_MEND, BAD_INPUT, NOT_COMPLETED, NOT_LOGGED, INTERRUPTED = 1, 2, 3, 4, 130

app = typer.Typer(
    help="Measure what training optimizations do to memory and throughput.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# Without markup: messages and paths may hold brackets.
console = Console(stderr=True, markup=False)

_LENIENT = {"allow_extra_args": True, "ignore_unknown_options": True}


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option per field of the configuration, in addition to its own.

    Values stay text: the models parse them, so a command line and a YAML file mean the same.
    """
    own = [p for p in inspect.signature(command).parameters.values() if p.name != "settings"]
    fields = [_option(name) for name in (*FIELDS, "effective_batch")]

    def wrapper(**values: Any) -> None:
        settings = {p.name: values.pop(p.name) for p in fields}
        command(settings={k: v for k, v in settings.items() if v is not None}, **values)

    wrapper.__signature__ = inspect.Signature([*own, *fields])  # type: ignore[attr-defined]
    wrapper.__doc__ = command.__doc__
    return wrapper


def _option(name: str) -> inspect.Parameter:
    spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
    if name in FIELDS:
        field = GROUPS[FIELDS[name]].model_fields[name]
        default = "" if field.default is None or field.default_factory else f" [{field.default}]"
        chosen = get_origin(field.annotation) is Literal
        choices = f": {', '.join(get_args(field.annotation))}" if chosen else ""
        # Without the escape rich takes a default in brackets for a colour.
        text, panel = escape(f"{field.description}{choices}{default}"), FIELDS[name].capitalize()
    else:
        text, panel = "micro_batch x accumulation: sets accumulation", "Training"
    option = typer.Option(*spellings, help=text, rich_help_panel=panel, show_default=False)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, option]
    )


@app.command("run", context_settings=_LENIENT)
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
    config = _configuration(preset, workload, settings, context.args)
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


def _configuration(
    preset: str, workload: str, settings: dict[str, str], extra: Sequence[str]
) -> RunConfig:
    """Return the checked configuration; say in one line what `auto` came to mean."""
    why = ""
    if workload == DEFAULT_WORKLOAD:
        named = asked_for(preset, "workload")
        device = settings.get("device") or asked_for(preset, "device") or "auto"
        workload, why = (
            (named, f"workload=auto: {named}, as the preset's file says")
            if named
            else default_workload(device)
        )
    config = resolve(preset, workload, settings | _unknown_options(extra), look)
    for line in filter(None, (why, why_no_gpu(config.measurement.device))):
        console.print(line, highlight=False, soft_wrap=True)
    return with_device(config)


def _unknown_options(words: Sequence[str]) -> dict[str, str]:
    """Return options that are no fields, so that they are reported with everything else."""
    found = {}
    for index, word in enumerate(words):
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            following = words[index + 1] if index + 1 < len(words) else ""
            found[name.replace("-", "_")] = value or (
                "" if following.startswith("--") else following
            )
        elif index == 0 or not words[index - 1].startswith("--"):
            found[word] = ""
    return found


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
