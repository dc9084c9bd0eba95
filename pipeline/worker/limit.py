"""Have a big GPU behave like a small one, context included."""

import torch

from pipeline.record import MIB


def cap_allocator(limit_bytes: int, total_bytes: int, process_bytes: int | None) -> None:
    """Have the allocator refuse what a card of this size could not give.

    Called before the first allocation and again after the first step: CUDA's context grows as
    kernels and cuBLAS are loaded, and none of that goes through the allocator.
    """
    room = allocator_room(limit_bytes, process_bytes or 0, torch.cuda.memory_reserved())
    torch.cuda.set_per_process_memory_fraction(min(room / total_bytes, 1.0))


def allocator_room(limit_bytes: int, process_bytes: int, reserved_bytes: int) -> int:
    """Return what is left of the limit for the allocator: all but the context."""
    context = max(process_bytes - reserved_bytes, 0)
    return max(limit_bytes - context, 0)


def check_taken(taken_bytes: int, limit_mib: int) -> None:
    """Raise what a card of this size would have raised: the cap comes a step late."""
    if taken_bytes > limit_mib * MIB:
        raise torch.OutOfMemoryError(
            f"out of memory: {taken_bytes / MIB:.0f} MiB were taken, memory_limit_mib={limit_mib}"
        )
