"""What is known of each setting before anything is measured: where a search looks first.

Only guesses, to be overruled by trials. A factor of 1 says "no idea"; what a setting does to a
model of another kind may well differ, so each guess is taken with a wide margin.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class Expected(NamedTuple):
    """Factors on parts of the memory and of the time, against the plainest setting."""

    fixed_memory: float = 1.0
    """Context, weights, gradients and optimizer state."""
    sample_memory: float = 1.0
    """Activations of one sample."""
    sample_time: float = 1.0
    """Computation on one sample."""
    pass_time: float = 1.0
    """Launching one forward and backward pass, whatever is in it."""
    step_time: float = 1.0
    """The optimizer step."""


_EXPECTED: Mapping[tuple[str, Any], Expected] = MappingProxyType(
    {
        ("gradient_checkpointing", True): Expected(1.0, 0.25, 1.3, 1.4, 1.0),
        ("precision", "tf32"): Expected(1.0, 1.0, 0.4, 1.0, 1.0),
        ("precision", "bf16"): Expected(1.05, 0.6, 0.25, 1.2, 1.0),
        ("precision", "fp16"): Expected(1.05, 0.6, 0.25, 1.2, 1.2),
        ("precision", "fp8"): Expected(1.05, 0.6, 0.25, 2.0, 1.0),
        ("precision", "pure_bf16"): Expected(0.6, 0.5, 0.25, 1.0, 0.8),
        ("optimizer", "adafactor"): Expected(0.7, 1.0, 1.0, 1.0, 8.0),
        ("optimizer", "sgd"): Expected(0.65, 1.0, 1.0, 1.0, 0.8),
        ("optimizer", "adamw_bnb_8bit"): Expected(0.75, 1.0, 1.0, 1.0, 1.5),
        ("optimizer", "adamw_8bit"): Expected(0.75, 1.0, 1.0, 1.0, 1.5),
        ("optimizer", "bnb_adam8bit"): Expected(0.7, 1.0, 1.0, 1.0, 1.5),
        ("optimizer", "paged_adamw_8bit"): Expected(0.75, 1.0, 1.0, 1.0, 2.0),
        ("optimizer", "lion_8bit"): Expected(0.7, 1.0, 1.0, 1.0, 1.5),
        ("attention", "eager"): Expected(1.0, 2.0, 1.3, 1.1, 1.0),
        ("compile", True): Expected(1.0, 0.8, 0.8, 0.7, 1.0),
        ("alloc_conf", "expandable_segments:True"): Expected(0.95, 0.97, 1.0, 1.0, 1.0),
    }
)


def expected(option: tuple[str, Any]) -> Expected:
    """Return what is expected of a setting."""
    return _EXPECTED.get(option, Expected())
