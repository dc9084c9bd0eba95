"""A card that behaves like a smaller one."""

import pytest
import torch

from pipeline.record import MIB
from pipeline.worker.limit import allocator_room, check_taken


@pytest.mark.parametrize(
    ("process", "reserved", "room"),
    [
        (520, 0, 1980),  # before the first allocation: the bare context
        (2602, 1850, 1748),  # after the first step: kernels and cuBLAS are part of the context
        (3000, 200, 0),
    ],
)
def test_context_is_taken_from_the_limit(process: int, reserved: int, room: int) -> None:
    assert allocator_room(2500 * MIB, process * MIB, reserved * MIB) == room * MIB


def test_more_than_the_limit_is_out_of_memory() -> None:
    check_taken(2500 * MIB, 2500)
    with pytest.raises(torch.OutOfMemoryError, match="2602 MiB were taken, memory_limit_mib=2500"):
        check_taken(2602 * MIB, 2500)
