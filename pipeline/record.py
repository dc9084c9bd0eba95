"""What a run measured: the events of a worker, the record made of them, and their units.

Bytes and seconds inside; MiB and milliseconds only in names that say so. Times count from the
moment the worker took up the training, which is where the memory curve begins.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AllowInfNan, Field

from pipeline.config import Frozen, RunConfig

MIB = 1024**2
MemorySource = Literal["nvml_process", "nvml_device", "process_uss"]
Phase = Literal["forward", "backward", "optimizer"]
Reported = Annotated[float, AllowInfNan(True)]
"""A figure of the Trainer's own: a training that diverges ends with a loss of NaN."""


class Outcome(StrEnum):
    """How a training ended."""

    COMPLETED = "completed"
    OUT_OF_MEMORY = "out_of_memory"
    UNSUPPORTED = "unsupported"
    TIMEOUT = "timeout"
    FAILED = "failed"


class MemorySample(NamedTuple):
    """One reading, in bytes. A figure that this device does not have is None."""

    seconds: float
    process: int | None
    """What the training takes from others: the headline's curve."""
    device: int | None = None
    """NVML used, whole device, all processes."""
    allocated: int | None = None
    reserved: int | None = None


class StepMark(NamedTuple):
    """One optimizer step. Its time begins when its batches are there."""

    step: int
    begun: float
    ended: float
    samples: int | None
    peak_allocated: int | None = None


class Process(Frozen):
    """Another process that held memory of the device."""

    pid: int
    name: str
    bytes: int | None


class Device(Frozen):
    """What the training ran on."""

    kind: Literal["cuda", "cpu"]
    name: str
    uuid: str | None = None
    total_bytes: int | None = None
    processes: tuple[Process, ...] = ()
    """Others on the device when the measurement began: they spoil it."""


class Effective(Frozen):
    """The settings as the built training shows them, read back from its objects."""

    parameter_dtype: str
    autocast_dtype: str | None
    tf32: bool
    optimizer: str
    optimizer_state_dtypes: Mapping[str, int] = Field(default_factory=dict)
    """Bytes of optimizer state by dtype, after the first step."""
    checkpointed_layers: int
    attention: str
    compiled: bool
    float8_layers: int = 0
    micro_batch: int
    accumulation: int
    parameters: int

    @property
    def optimizer_bytes(self) -> int:
        """Bytes that the optimizer's state holds."""
        return sum(self.optimizer_state_dtypes.values())

    @property
    def eight_bit_share(self) -> float | None:
        """Share of the optimizer's state that is kept in 8 bits; None for one without state."""
        total = self.optimizer_bytes
        eight = self.optimizer_state_dtypes.get("uint8", 0)
        return eight / total if total else None


class Ledger(Frozen):
    """The peak taken apart, in bytes; the parts sum to it."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """With all temporaries; on a CPU, everything that is none of the parts before."""
    unused: int | None = None
    """Held by torch's allocator without use; None on a CPU."""
    context: int | None = None
    """CUDA context and libraries; None on a CPU."""
    phase: Phase | None = None


class Started(Frozen):
    """The worker has its device and begins to build the training."""

    device: Device
    memory_source: MemorySource | None
    """None: the device could not be matched with NVML, so there is no curve."""
    versions: Mapping[str, str]
    clock: float
    """time.perf_counter() at second 0."""
    requested: float | None = None
    """time.perf_counter() when somebody asked for this training."""


class Built(Frozen):
    """Model and Trainer exist; the first step follows."""

    total_steps: int
    asked_batch: int
    arguments: Mapping[str, Any]
    """transformers.TrainingArguments as it was built, JSON-ready."""


class Samples(Frozen):
    """A stretch of the memory curve."""

    rows: tuple[MemorySample, ...]


class Steps(Frozen):
    """Optimizer steps that ended since the last message."""

    rows: tuple[StepMark, ...]


class Logged(Frozen):
    """What the Trainer logged at a step: loss and the like."""

    step: int
    values: Mapping[str, Reported]


class Proven(Frozen):
    """The settings were read back after the first step."""

    effective: Effective


class Composed(Frozen):
    """What was alive at the peak of one step, in bytes, counted from the objects."""

    weights: int
    gradients: int
    optimizer: int
    managed: int = 0
    """Of the optimizer's state, what lies in managed memory."""
    phase: Phase | None = None


class Kept(Frozen):
    """A file that the worker made."""

    name: str
    content: bytes


class Warned(Frozen):
    """Something the reader of the figures should know."""

    message: str


class Finished(Frozen):
    """The last word of a worker that could still speak."""

    outcome: Outcome
    message: str = ""
    metrics: Mapping[str, Reported] = Field(default_factory=dict)
    """The Trainer's own summary."""
    end_device_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    flops_per_sample: float | None = None
    peak_flops: float | None = None
    """The device's peak for this precision, FLOP/s."""
    memory_source: MemorySource | None = None
    """Where the headline came from, once the whole curve is known."""


Event = Started | Built | Samples | Steps | Logged | Proven | Composed | Kept | Warned | Finished


class RunRecord(Frozen):
    """All that is known about one training, whatever became of it; curves are kept apart."""

    config: RunConfig
    outcome: Outcome
    message: str = ""
    interrupted: bool = False
    started_at: float
    ended_at: float
    device: Device | None = None
    memory_source: MemorySource | None = None
    versions: Mapping[str, str] = Field(default_factory=dict)
    effective: Effective | None = None
    ledger: Ledger | None = None
    warnings: tuple[str, ...] = ()
    diverged: bool = False
    """The loss was not finite at some step, so the run is no candidate for a best one."""
    steps: int = 0
    total_steps: int | None = None
    metrics: Mapping[str, float] = Field(default_factory=dict)
    """The summary figures, under the names that MLflow shows; what was not measured is absent."""
