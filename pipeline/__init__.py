"""Measure what training optimizations do to GPU memory and throughput, and track it in MLflow."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.worker.callback import MemoryCallback

__all__ = ["MemoryCallback"]


def __getattr__(name: str) -> Any:
    """Import MemoryCallback when it is used: it needs torch, which the command line does not."""
    if name != "MemoryCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pipeline.worker.callback import MemoryCallback

    return MemoryCallback
