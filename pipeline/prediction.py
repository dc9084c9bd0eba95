"""What is known of a training's memory before it runs."""

from collections.abc import Iterator
from typing import Any

from pipeline.config import Frozen, RunConfig
from pipeline.record import MIB, Ledger

_WORDS = {
    "weights": "weights and buffers",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "activations": "activations and temporaries",
    "unused": "held unused by the allocator",
    "context": "CUDA context and kernels",
}
_PARTS = tuple(_WORDS)


class Prediction(Frozen):
    """The memory that a training takes on a card, by a run of it without data."""

    card: str
    usable_mib: int
    ledger: Ledger
    not_covered: tuple[str, ...] = ()
    """What the figures leave out, in plain words."""

    @property
    def peak_memory_mib(self) -> float:
        """What the driver will show for the process at the peak."""
        parts: list[int] = [getattr(self.ledger, part) for part in _PARTS]
        return sum(parts) / MIB

    @property
    def peak_reserved_mib(self) -> float:
        """What torch's allocator takes from the device."""
        return self.peak_memory_mib - (self.ledger.context or 0) / MIB

    @property
    def peak_allocated_mib(self) -> float:
        """What of that is in use at the peak."""
        return self.peak_reserved_mib - (self.ledger.unused or 0) / MIB

    @property
    def fits(self) -> bool:
        """Whether the card has that much."""
        return self.peak_memory_mib <= self.usable_mib

    def document(self) -> dict[str, Any]:
        """Return all of it for JSON, with units in the names."""
        figures = ("peak_memory_mib", "peak_allocated_mib", "peak_reserved_mib")
        return {
            "device": self.card,
            **{name: round(getattr(self, name), 3) for name in figures},
            "ledger": {
                f"{part}_mib": round(getattr(self.ledger, part) / MIB, 3) for part in _PARTS
            },
            "peak_phase": self.ledger.phase,
            "fits": self.fits,
            "usable_memory_mib": self.usable_mib,
            "not_covered": list(self.not_covered),
        }


class NoPrediction(Frozen):
    """Why nothing can be said of a training."""

    reason: str

    def document(self) -> dict[str, Any]:
        """Return it for JSON."""
        return self.model_dump()


def promise(config: RunConfig, prediction: Prediction) -> str:
    """Return in a phrase whether the training fits."""
    fits = "fits" if prediction.fits else "does not fit"
    limit = f"{prediction.card}, which has {prediction.usable_mib:,} MiB"
    return f"{config.preset.name} on {config.workload_name} {fits} on {limit} (predicted)"


def predicted(prediction: Prediction) -> Iterator[tuple[str, str]]:
    """Yield the figures with their units: the peak, and what it is made of."""
    ledger = prediction.ledger
    at = f", in the {ledger.phase} pass" if ledger.phase in ("forward", "backward") else ""
    at = ", in the optimizer's step" if ledger.phase == "optimizer" else at
    yield "peak memory", f"{prediction.peak_memory_mib:,.0f} MiB{at}"
    for part in _PARTS:
        yield f"  {_WORDS[part]}", f"{getattr(ledger, part) / MIB:,.0f} MiB"
    yield "peak allocated by torch", f"{prediction.peak_allocated_mib:,.0f} MiB"
    yield "peak reserved by torch", f"{prediction.peak_reserved_mib:,.0f} MiB"
