"""What CUDA does differently from a CPU, as far as it changes memory.

The prediction runs on tensors without data that claim to be on a CPU. There, attention is not
fused, dropout keeps its mask as floats, and autocast leaves more operations in 16 bits. Here these
are replaced by the operators that CUDA has in their place, whose shapes PyTorch knows.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.utils import _foreach_utils

aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_FLASH_CAPABILITY, _FLASH_MAX_HEAD = (8, 0), 256

# The lists of ATen/autocast_mode.h, AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE, as far as they
# hold operations of language models: autocast runs these in fp32 on CUDA.
_AUTOCAST_FP32 = (
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "softplus",
    "layer_norm",
    "native_layer_norm",
    "rms_norm",
    "group_norm",
    "cosine_similarity",
    "nll_loss",
    "nll_loss2d",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "binary_cross_entropy_with_logits",
    "dist",
    "cdist",
    "renorm",
    "logsumexp",
)
_AUTOCAST_FP32_RESULT = (
    "prod",
    "prod.dim_int",
    "softmax.int",
    "log_softmax.int",
    "cumprod",
    "cumsum",
    "linalg_vector_norm",
    "sum",
    "sum.dim_IntList",
)
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


@contextmanager
def cuda_behaviour(capability: tuple[int, int]) -> Iterator[None]:
    """Have operators on the CPU behave in memory as CUDA's do on such a card, for the block."""
    library = torch.library.Library("aten", "IMPL")
    for name in _AUTOCAST_FP32:
        library.impl(name, _in_fp32(_overload(name)), "AutocastCPU")
    for name in _AUTOCAST_FP32_RESULT:
        library.impl(name, _to_fp32(_overload(name)), "AutocastCPU")
    library.impl("dropout", _dropout, "AutogradCPU")
    attention = partial(_attention, flash=capability >= _FLASH_CAPABILITY)
    library.impl("scaled_dot_product_attention", attention, "AutogradCPU")
    # Optimizers and the norm of the gradients work on lists of tensors where the device can.
    devices = mock.patch.object(
        _foreach_utils, "_get_foreach_kernels_supported_devices", return_value=["cpu", "cuda"]
    )
    try:
        with devices:
            yield
    finally:
        library._destroy()


def _overload(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")  # type: ignore[no-any-return]


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _HALF


def _in_fp32(operation: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            cast = [arg.float() if _is_half(arg) else arg for arg in args]
            return operation(*cast, **kwargs)

    return run


def _to_fp32(operation: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            if _is_half(args[0]) and kwargs.get("dtype") is None and len(args) < 3:
                kwargs["dtype"] = torch.float32
            return operation(*args, **kwargs)

    return run


def _dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Keep the mask as booleans, as the fused kernel does."""
    if not train or p == 0:
        return tensor
    return torch.native_dropout(tensor, p, train=True)[0]


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    flash: bool,
) -> torch.Tensor:
    """Take the kernel that CUDA takes: flash, memory-efficient, or the plain one.

    The choice is that of ATen/native/transformers/cuda/sdp_utils.cpp.
    """
    head, half = query.shape[-1], query.dtype in _HALF
    same_heads = query.shape[1] == key.shape[1]
    if flash and half and attn_mask is None and head <= _FLASH_MAX_HEAD and head == value.shape[-1]:
        padded = [_padded(each, 8) for each in (query, key, value)]
        out: torch.Tensor = aten._scaled_dot_product_flash_attention(
            *padded, dropout_p, is_causal, scale=scale or head**-0.5
        )[0]
        return out[..., :head] if head % 8 else out
    if same_heads and head % (8 if half else 4) == 0:
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        needs_gradient = any(each.requires_grad for each in (query, key, value))
        result: torch.Tensor = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, needs_gradient, dropout_p, is_causal, scale=scale
        )[0]
        return result
    plain: torch.Tensor = aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return plain


def _padded(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return the mask as the kernel wants it: numbers to add, in rows of a multiple of 16 bytes."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, float("-inf")).to(query.dtype)
    length = mask.shape[-1]
    mask = _padded(mask, 16)[..., :length]
    return mask.expand(*query.shape[:3], key.shape[2])
