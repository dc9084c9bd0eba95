"""The command `search`: its options and its exit codes."""

import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from pipeline.config import DEFAULT_PRESET, DEFAULT_WORKLOAD
from pipeline.errors import ConfigError
from pipeline.options import INTERRUPTED, NOT_COMPLETED, NOT_LOGGED, configurations, with_settings

console = Console(stderr=True, markup=False)


def _option(name: str, text: str) -> Any:
    """Return an option that is written with `_` or with `-`."""
    spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
    return typer.Option(*spellings, help=text, rich_help_panel="Search")


@with_settings
def search_command(
    *,
    context: typer.Context,
    settings: dict[str, str],
    preset: Annotated[
        str, typer.Option(help="what every trial starts from: name, file, or several joined by +")
    ] = DEFAULT_PRESET,
    workload: Annotated[str, typer.Option(help="name, file or auto")] = DEFAULT_WORKLOAD,
    min_throughput: Annotated[
        str, _option("min_throughput", "samples per second (30), or a share of the start's (90%)")
    ] = "90%",
    effective_batch: Annotated[
        str | None,
        _option("effective_batch", "of every trial: 32, 16,32, or 8..64, which doubles"),
    ] = None,
    micro_batches: Annotated[
        str | None, _option("micro_batches", "to choose from: 1,2,4; else all that divide")
    ] = None,
    space: Annotated[
        str, _option("space", "batch, full, or a file of your own: what may vary")
    ] = "batch",
    sampler: Annotated[
        str, _option("sampler", "frugal; or, to compare with, tpe, gp, grid, random")
    ] = "frugal",
    trials: Annotated[
        int | None, _option("trials", "at most so many configurations are tried now")
    ] = None,
    timeout: Annotated[
        float | None, _option("timeout", "seconds after which no further one is tried")
    ] = None,
    trial_timeout: Annotated[
        str | None, _option("trial_timeout", "seconds after which one training is ended")
    ] = None,
    study: Annotated[
        str | None, _option("study", "a name, to go on with it later, or from several processes")
    ] = None,
    storage: Annotated[
        str | None, _option("storage", "of Optuna: sqlite:///FILE (optuna.db), postgresql://...")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print the answer as JSON")] = False,
) -> None:
    """Find the least memory with which a training reaches a throughput."""
    for name, number in (("trials", trials), ("timeout", timeout)):
        if number is not None and number <= 0:
            raise ConfigError(f"{name}={number}: expected a number above 0")
    if trial_timeout:
        settings = settings | {"timeout": trial_timeout}
    [start] = configurations([preset], workload, settings, context.args, console)
    # These import Optuna and MLflow: not before the input is known to be good.
    from pipeline.search.command import as_json, search
    from pipeline.search.prepare import Asked, prepare

    asked = Asked(min_throughput, effective_batch, micro_batches, space, sampler, trials, timeout)
    searched = search(prepare(asked, start), study, storage, console)
    if json:
        sys.stdout.write(as_json(searched.answer) + "\n")
    if searched.stopped_by:
        console.print(f"error: {searched.stopped_by}", soft_wrap=True)
    for problem in searched.unlogged:
        console.print(f"error: {problem}", soft_wrap=True)
    if searched.interrupted:
        raise typer.Exit(INTERRUPTED)
    if searched.stopped_by or searched.answer.start_failed:
        raise typer.Exit(NOT_COMPLETED)
    raise typer.Exit(NOT_LOGGED if searched.unlogged else 0)
