"""What kernels take for themselves, against their own division of work reckoned by hand."""

import pytest
import torch

from pipeline.cards import CARDS
from pipeline.worker.cuda_temporaries import temporaries

aten = torch.ops.aten
H200 = CARDS["h200"]
MIB = 1024**2


def on_no_device(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


@pytest.mark.parametrize(
    ("shape", "dims", "mib"),
    [
        # 2048 rows: 4 rows of threads, 512 numbers each, in 32 blocks of 16; 128 numbers a column.
        ((2048, 768), [0], 12),
        ((2048, 3072), [0], 48),
        # 352 blocks fill the card, however many rows there are.
        ((30522, 768), [-2], 132),
        ((4, 512, 768), [0, 1], 12),
        # Too few rows to be worth it.
        ((512, 768), [0], 0),
        ((4, 512, 768), [0], 0),
        # Along rows.
        ((2048, 768), [1], 0),
    ],
)
def test_sums_of_columns_leave_parts_in_memory(
    shape: tuple[int, ...], dims: list[int], mib: int
) -> None:
    for operation in (aten.sum.dim_IntList, aten.mean.dim):
        taken = temporaries(operation, (on_no_device(*shape), dims), H200)
        assert sum(taken) == mib * MIB


def test_embedding_backward_sorts_more_than_3072_indices() -> None:
    operation = aten.embedding_dense_backward.default
    few, many = (torch.empty(count, device="meta", dtype=torch.long) for count in (3072, 4096))
    assert temporaries(operation, (on_no_device(3072, 768), few, 30522, -1, False), H200) == []
    taken = temporaries(operation, (on_no_device(4096, 768), many, 30522, -1, False), H200)
    assert taken == [4096 * 8, 4096 * 8, (4096 + 409) * 768 * 4]


def test_other_operators_take_nothing() -> None:
    assert temporaries(aten.mm.default, (on_no_device(2, 2), on_no_device(2, 2)), H200) == []
