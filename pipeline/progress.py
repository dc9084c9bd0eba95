"""Show a training while it runs: a live line on a terminal, plain lines elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status

from pipeline.record import MIB, Built, Event, Proven, Samples, Started, Steps
from pipeline.recorder import Recorder

_LIVE_SECONDS = 0.5
_PLAIN_SECONDS = 5.0
_WINDOW_STEPS = 20


class Progress:
    """Tells step, throughput, memory and time left, as often as is of use."""

    def __init__(self, console: Console, recorder: Recorder) -> None:
        self._console = console
        self._recorder = recorder
        self._status: Status | None = None
        self._shown = time.monotonic()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status = self._console.status(
                "starting the training process", refresh_per_second=2
            )
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._status:
            self._status.stop()

    def handle(self, event: Event) -> None:
        """Take note of an event, and show how things stand if it is time to."""
        self._recorder.handle(event)
        match event:
            case Started(device=device):
                self._say(f"building the model on {device.name}")
            case Built(total_steps=total):
                self._say(f"training: {total} steps")
            case Proven():
                self._say("settings read back and in effect")
            case Samples() | Steps():
                period = _LIVE_SECONDS if self._status else _PLAIN_SECONDS
                if self._recorder.steps and time.monotonic() - self._shown >= period:
                    self._say(self.line())

    def line(self) -> str:
        """Return how things stand."""
        recorder = self._recorder
        total = recorder.built.total_steps if recorder.built else None
        recent = recorder.steps[-_WINDOW_STEPS:]
        parts = [f"step {recent[-1].step}/{total or '?'}"] if recent else []
        seconds = recent[-1].ended - recent[0].ended if recent else 0.0
        counts = [mark.samples or 0 for mark in recent[1:]]
        if seconds > 0:
            if sum(counts):
                parts.append(f"{sum(counts) / seconds:.4g} samples/s")
            if total:
                left = (total - recent[-1].step) * seconds / (len(recent) - 1)
                parts.append(f"{left:.0f} s left")
        now = next((s.process for s in reversed(recorder.samples) if s.process is not None), None)
        if now is not None and recorder.peak and recorder.peak.process:
            parts.insert(-1, f"{now / MIB:,.0f} MiB (peak {recorder.peak.process / MIB:,.0f})")
        return "  ".join(parts)

    def _say(self, text: str) -> None:
        self._shown = time.monotonic()
        if self._status:
            self._status.update(text)
        else:
            self._console.print(text, highlight=False)
