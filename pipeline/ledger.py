"""The peak taken apart: what is left when the parts that were counted are taken off. Pure."""

from pipeline.record import Composed, Finished, Ledger


def taken_apart(peak: int, composed: Composed, finished: Finished) -> Ledger | None:
    """Return the parts of a peak of so many bytes; None where they do not fit into it.

    On a GPU the driver's figure is at its peak when the allocator's reserve is: what is beyond
    that is context and libraries, and what of the reserve was not allocated at its peak is unused.
    """
    counted = composed.weights + composed.gradients + composed.optimizer
    allocated, reserved = finished.peak_allocated_bytes, finished.peak_reserved_bytes
    parts = composed.model_dump(include={"weights", "gradients", "optimizer", "phase"})
    if allocated is None or reserved is None:
        return Ledger(**parts, activations=peak - counted) if peak >= counted else None
    context, managed = peak - reserved, 0
    if finished.memory_source == "nvml_device":  # which sees the pages of paged optimizers
        managed = min(composed.managed, max(context, 0))
    if allocated < counted or context < 0:
        return None
    parts["optimizer"] += managed
    return Ledger(
        **parts,
        activations=allocated - counted,
        unused=reserved - allocated,
        context=context - managed,
    )
