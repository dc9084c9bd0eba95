"""Errors that cross module borders."""

from collections.abc import Sequence


class PipelineError(Exception):
    """Base of what this package raises on purpose."""


class ConfigError(PipelineError):
    """Bad input: nothing was started. Holds every problem that was found, not just the first."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems: Sequence[str] = problems


class UnsupportedError(PipelineError):
    """This machine cannot run the setting; the message says what it needs."""


class NotInEffectError(PipelineError):
    """A setting was asked for and the built training does not show it."""


class TrackingError(PipelineError):
    """The tracking server cannot be used, or did not take everything."""


class Interrupted(BaseException):
    """Somebody asked the command to stop: Ctrl-C, SIGTERM, or the end of the `mlflow run` above."""
