"""What CUDA's operators take from the allocator within one call and give back before it ends.

PyTorch knows shapes of results alone, so these are listed, from the kernels' sources in ATen.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from pipeline.cards import Card

aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_FP32_BYTES, _INT64_BYTES = 4, 8
# Of sums: threads of a block, of a warp, and how many numbers a thread should and may add up.
_REDUCE_THREADS, _WARP, _FEW, _MANY = 512, 32, 16, 256


def temporaries(operation: Any, args: Any, card: Card) -> list[int]:
    """Return the bytes that CUDA's operator takes for itself and returns before it ends."""
    if operation in _REDUCTIONS:
        return _column_sums(args[0], args[1], card) if len(args) > 1 else []
    rule = _TEMPORARIES.get(operation)
    return rule(*args) if rule else []


def _column_sums(tensor: torch.Tensor, dims: Sequence[int] | None, card: Card) -> list[int]:
    """Many blocks of threads add up one column, and leave what they have in memory for the last.

    That is 128 numbers a column and block, so a bias costs more than its gradient. The division
    of the work is that of ATen/native/cuda/Reduce.cuh (setReduceConfig). Sums along rows, where
    the numbers lie side by side, need next to nothing.
    """
    reduced = {dim % tensor.ndim for dim in dims or range(tensor.ndim)}
    kept = [dim for dim in range(tensor.ndim) if dim not in reduced]
    strides = {dim: tensor.stride(dim) for dim in range(tensor.ndim) if tensor.shape[dim] > 1}
    if not kept or not strides or min(strides, key=strides.__getitem__) in reduced:
        return []
    columns, rows = prod(tensor.shape[dim] for dim in kept), prod(tensor.shape[d] for d in reduced)
    vector = next(size for size in (4, 2, 1) if tensor.shape[kept[-1]] % size == 0)
    threads = _REDUCE_THREADS // vector
    width = min(_power_of_2(columns // vector, threads), _WARP)
    height = min(_power_of_2(rows, threads), threads // width)
    width = min(_power_of_2(columns // vector, threads), threads // height)
    each = rows
    if each < min(height * _FEW, _MANY):
        return []
    each = -(-each // height)
    grid = -(-(columns // vector) // width)
    room = card.multiprocessors * (card.threads // (width * height))
    if each < _MANY or grid > room:
        return []
    blocks = max(min(-(-room // grid), -(-each // _FEW)), -(-each // _MANY))
    return [_FP32_BYTES * columns * blocks * width * vector] if blocks > 1 else []


def _power_of_2(number: int, most: int) -> int:
    """Return the largest power of two up to both."""
    return 1 << (max(1, min(number, most)).bit_length() - 1)


def _embedding_backward(
    grad: torch.Tensor, indices: torch.Tensor, num_weights: int, *_: Any
) -> list[int]:
    """Sort the indices, then sum up each run of equal ones in parts (cuda/EmbeddingBackwardKernel).

    Up to 3072 indices another kernel needs nothing.
    """
    count = indices.numel()
    if count <= 3072:
        return []
    runs = min(count, num_weights)
    parts = count // 10 + runs
    return [count * _INT64_BYTES] * 2 + [parts * grad.shape[-1] * _FP32_BYTES]


def _flash_backward(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *_: Any
) -> list[int]:
    """Sum up the queries' gradient in fp32; keys shared by heads have a gradient for each."""
    batch, heads, length, head = query.shape
    length, padded = -(-length // 128) * 128, -(-head // 32) * 32
    sums = [batch * heads * length * _FP32_BYTES, batch * heads * length * padded * _FP32_BYTES]
    shared = key.shape[1] != heads
    expanded = batch * heads * key.shape[2] * head * key.element_size()
    return sums + [expanded] * 2 * shared


def _efficient_backward(grad_out: torch.Tensor, query: torch.Tensor, *_: Any) -> list[int]:
    """Sum up output x gradient per row: in the kernel for 16 bits, beside it for fp32."""
    rows = prod(query.shape[:3]) * _FP32_BYTES
    return [rows] if query.dtype in _HALF else [prod(grad_out.shape) * _FP32_BYTES, rows]


_REDUCTIONS = frozenset({aten.sum.dim_IntList, aten.mean.dim})
_TEMPORARIES: dict[Any, Callable[..., list[int]]] = {
    aten.embedding_dense_backward.default: _embedding_backward,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
}
# Products of matrices, each of which runs in cuBLAS.
PRODUCTS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default})
