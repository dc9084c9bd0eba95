"""Show a training while it runs: a live line on a terminal, plain lines elsewhere."""

import time
from collections import deque
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status

from pipeline.record import (
    MIB,
    Built,
    Event,
    MemorySample,
    Proven,
    Samples,
    Started,
    StepMark,
    Steps,
)
from pipeline.recorder import highest

_LIVE_SECONDS = 0.5
_PLAIN_SECONDS = 5.0
_WINDOW_STEPS = 20


class Progress:
    """Tells step, throughput, memory and time left, as often as is of use."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._shown = time.monotonic()
        self._total_steps: int | None = None
        self._recent: deque[StepMark] = deque(maxlen=_WINDOW_STEPS)
        self._now: MemorySample | None = None
        self._peak: MemorySample | None = None

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
        match event:
            case Started(device=device):
                self._say(f"building the model on {device.name}")
            case Built(total_steps=total):
                self._total_steps = total
                self._say(f"training: {total} steps")
            case Proven():
                self._say("settings read back and in effect")
            case Samples(rows=rows):
                self._now = next((r for r in reversed(rows) if r.process is not None), self._now)
                self._peak = highest(self._peak, rows)
                self._show()
            case Steps(rows=marks):
                self._recent.extend(marks)
                self._show()

    def line(self) -> str:
        """Return how things stand."""
        parts = []
        recent, total = self._recent, self._total_steps
        if recent:
            parts.append(f"step {recent[-1].step}/{total or '?'}")
        seconds = recent[-1].ended - recent[0].ended if recent else 0.0
        counts = [mark.samples or 0 for mark in recent][1:]
        if seconds > 0 and any(counts):
            parts.append(f"{sum(counts) / seconds:.4g} samples/s")
        if self._now and self._now.process is not None and self._peak and self._peak.process:
            peak = f"{self._peak.process / MIB:,.0f}"
            parts.append(f"{self._now.process / MIB:,.0f} MiB (peak {peak})")
        if seconds > 0 and total:
            left = (total - recent[-1].step) * seconds / len(counts)
            parts.append(f"{left:.0f} s left")
        return "  ".join(parts)

    def _show(self) -> None:
        period = _LIVE_SECONDS if self._status else _PLAIN_SECONDS
        if self._recent and time.monotonic() - self._shown >= period:
            self._say(self.line())

    def _say(self, text: str) -> None:
        self._shown = time.monotonic()
        if self._status:
            self._status.update(text)
        else:
            self._console.print(text, highlight=False)
