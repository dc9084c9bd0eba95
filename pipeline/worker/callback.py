"""The TrainerCallback. It marks what happens; threads, files and runs belong to others."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from pipeline.config import Measurement
from pipeline.record import Built, Event, Kept, Logged, Proven, Steps, Warned
from pipeline.worker.adaptive import StopWhenKnown
from pipeline.worker.ledger import PeakTrace
from pipeline.worker.memory import AllocatorPeaks
from pipeline.worker.proof import (
    AutocastProbe,
    compiled_frames,
    installed_autocast,
    read_back,
)
from pipeline.worker.script import ScriptSession
from pipeline.worker.steps import BatchCounter, CudaClock, HostClock, StepClock


class MemoryCallback(TrainerCallback):
    """Measures memory and throughput of a transformers.Trainer.

    In your own script, `Trainer(..., callbacks=[MemoryCallback()])` logs settings, memory curves
    and throughput to the active MLflow run. A training that raises never says goodbye to its
    callbacks, so there `with MemoryCallback() as memory:` around it ends the watching at once.

    With a `sink` it only marks: events go there, and watching memory is the caller's. `origin` is
    the time.perf_counter() that all times count from. `on_proven` may look at the settings that
    were read back after the first step, and raise. Where `measurement` says "adaptive" the training
    ends as soon as enough is known; `taken` then tells the bytes that it takes now.
    """

    def __init__(
        self,
        sink: Callable[[Event], None] | None = None,
        origin: float | None = None,
        *,
        measurement: Measurement | None = None,
        on_proven: Callable[[Proven, torch.nn.Module], None] | None = None,
        taken: Callable[[], int] | None = None,
    ) -> None:
        measurement = measurement or Measurement()
        self._origin = time.perf_counter() if origin is None else origin
        self._script: ScriptSession | None = None
        if sink is None:
            self._script = ScriptSession(measurement, self._origin)
            sink = self._script.handle
        self._sink = sink
        self._on_proven = on_proven
        adaptive = measurement.measure == "adaptive"
        self._snapshot = measurement.snapshot
        self._stopping = StopWhenKnown(measurement, taken) if adaptive else None
        self.peaks: AllocatorPeaks | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._script:
            self._script.close(self.peaks, failed=error is not None)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """See TrainerCallback."""
        on_gpu = args.device.type == "cuda"
        if self._script and state.is_world_process_zero:  # one run, however many GPUs
            self._script.open(args.device)
        self.peaks = AllocatorPeaks() if on_gpu else None
        self._clock: StepClock = CudaClock(self._origin) if on_gpu else HostClock(self._origin)
        self._counter = BatchCounter(
            _rows(kwargs["train_dataloader"]),
            args.train_batch_size,
            drop_last=args.dataloader_drop_last,
            world_size=args.world_size,
        )
        # A hook inside a compiled model would break its graph.
        self._probe = None if args.torch_compile else AutocastProbe.of(kwargs["model"])
        self._proven = False
        self._trace: PeakTrace | None = None
        self._traced = False
        self._frames_before = compiled_frames()
        batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        arguments = {key: value for key, value in args.to_dict().items() if value is not None}
        self._sink(Built(total_steps=state.max_steps, asked_batch=batch, arguments=arguments))

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        """See TrainerCallback."""
        self._counter.next_epoch()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """See TrainerCallback."""
        # The first step after the proof is one of the steady state, and still warm-up.
        if not self._traced and (self._proven or state.max_steps == 1):
            self._traced = True
            self._trace = PeakTrace(args.device, self._keep if self._snapshot else None)
            self._trace.begin(kwargs["model"], args.torch_compile)
        self._clock.begin()

    def _keep(self, snapshot: bytes) -> None:
        self._sink(Kept(name="memory_snapshot.pickle", content=snapshot))

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        """See TrainerCallback."""
        self._counter.next_micro_batch()
        if self._trace:
            self._trace.next_micro_batch()

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """See TrainerCallback."""
        if self._trace:
            self._trace.before_optimizer(kwargs["model"])

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """See TrainerCallback."""
        self._counter.next_micro_batch()
        peak = self.peaks.lap() if self.peaks else None
        self._clock.end(state.global_step, self._counter.end_step(), peak)
        marks = self._clock.known(wait=state.global_step == 1)
        # A loss scale that is still too high has the first steps skipped: there is no state yet.
        if not self._proven and not getattr(kwargs["optimizer"], "step_was_skipped", False):
            self._prove(args, **kwargs)
        if self._trace:
            self._sink(self._trace.end(kwargs["model"], kwargs["optimizer"]))
            self._trace = None
        if marks:
            self._sink(Steps.model_construct(rows=tuple(marks)))
        if self._stopping and self._stopping.enough(marks):
            control.should_training_stop = True

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """See TrainerCallback."""
        logs = kwargs.get("logs") or {}
        values = {
            key: float(logs[key]) for key in ("loss", "grad_norm", "learning_rate") if key in logs
        }
        if values:
            self._sink(Logged.model_construct(step=state.global_step, values=values))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """See TrainerCallback."""
        marks = self._clock.known(wait=True)
        if marks:
            self._sink(Steps.model_construct(rows=tuple(marks)))
        if not self._proven:
            self._sink(Warned(message="every optimizer step was skipped: the gradients overflow"))
            self._prove(args, **kwargs)
        if self._script:
            self._script.close(self.peaks)

    def _prove(self, args: TrainingArguments, **kwargs: Any) -> None:
        self._proven = True
        model = kwargs["model"]
        autocast = self._probe.dtype if self._probe else installed_autocast(model)
        effective = read_back(model, kwargs["optimizer"], args, autocast, self._frames_before)
        event = Proven(effective=effective)
        self._sink(event)
        if self._on_proven:
            self._on_proven(event, model)


def _rows(loader: Any) -> int | None:
    """Return the number of rows that an epoch goes through; None for a stream."""
    try:
        return len(loader.dataset)
    except TypeError:
        return None
