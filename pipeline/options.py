"""What the commands share: an option per setting, and from options to configurations."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from rich.console import Console
from rich.markup import escape

from pipeline.config import DEFAULT_WORKLOAD, FIELDS, GROUPS, RunConfig
from pipeline.errors import ConfigError
from pipeline.preflight import default_workload, look, why_no_gpu, with_device
from pipeline.presets import asked_for, resolve

TO_MEND, BAD_INPUT, NOT_COMPLETED, NOT_LOGGED, INTERRUPTED = 1, 2, 3, 4, 130
LENIENT = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Of a command with settings: what it does not know is reported with everything else."""


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option per field of the configuration, in addition to its own.

    An option of its own by the name of a field takes that field's place.
    Values stay text: the models parse them, so a command line and a YAML file mean the same.
    """
    own = [p for p in inspect.signature(command).parameters.values() if p.name != "settings"]
    taken = {parameter.name for parameter in own}
    fields = [_option(name) for name in (*FIELDS, "effective_batch") if name not in taken]

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


def configurations(
    presets: Sequence[str],
    workload: str,
    settings: Mapping[str, str],
    extra: Sequence[str],
    console: Console,
) -> list[RunConfig]:
    """Return a checked configuration for each preset; say in a line what `auto` came to mean.

    `extra` are the words of the command line that are no option. Raises ConfigError with all that
    is wrong with any of them.
    """
    given = dict(settings) | _unknown_options(extra)
    found, lines, problems = [], dict[str, None](), list[str]()
    for preset in presets:
        chosen, why = _workload(preset, workload, settings)
        try:
            config = resolve(preset, chosen, given, look)
        except ConfigError as error:
            problems += error.problems
            continue
        lines |= dict.fromkeys(filter(None, (why, why_no_gpu(config.measurement.device))))
        found.append(with_device(config))
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    return found


def _workload(preset: str, workload: str, settings: Mapping[str, str]) -> tuple[str, str]:
    """Return what `auto` means for this preset, and why; a name as it is."""
    if workload != DEFAULT_WORKLOAD:
        return workload, ""
    named = asked_for(preset, "workload")
    if named:
        return named, f"workload=auto: {named}, as the preset's file says"
    return default_workload(settings.get("device") or asked_for(preset, "device") or "auto")


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
