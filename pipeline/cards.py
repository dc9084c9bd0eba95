"""What a prediction has to know of a GPU. Numbers that are no tensors stand here, and only here.

Capacity, multiprocessors and threads of each are NVIDIA's: data sheets of H200, H100, A100, A10,
L4, L40S, V100 and T4; for RTX 3080 and 3090 the white paper "NVIDIA Ampere GA102 GPU Architecture",
for RTX 4090 "NVIDIA Ada GPU Architecture".
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from pipeline.errors import ConfigError

_STACK_KIB = 1  # of each thread, CUDA's default (cudaLimitStackSize)
_BASE_MIB = 256  # what a context of the H200 takes besides: 520 MiB measured, less 264 of stacks
_KERNELS_MIB = 222  # kernels of torch and cuBLAS, loaded by the end of a step; measured on the H200
_HALF_KERNELS_MIB = 16  # and more of them for 16-bit products; measured on the H200
_DRIVER_MIB = 615  # what the driver keeps of a card; measured on the H200


class Card(NamedTuple):
    """A GPU as a prediction sees it."""

    name: str
    gib: int
    capability: tuple[int, int]
    multiprocessors: int
    threads: int
    """That a multiprocessor has room for."""

    @property
    def usable_mib(self) -> int:
        """Memory that processes can have."""
        return self.gib * 1024 - _DRIVER_MIB

    @property
    def workspace_mib(self) -> float:
        """What cuBLAS takes for each handle (ATen/cuda/CublasHandlePool.cpp)."""
        return 32.0 if self.capability >= (9, 0) else 8.125

    def context_mib(self, *, half: bool) -> float:
        """Memory of a process outside torch's allocator: the context, and the kernels in it.

        The context holds a stack for each thread that the card can run at once.
        """
        stacks = self.multiprocessors * self.threads * _STACK_KIB / 1024
        return _BASE_MIB + stacks + _KERNELS_MIB + (_HALF_KERNELS_MIB if half else 0)


CARDS: Mapping[str, Card] = MappingProxyType(
    {
        card.name: card
        for card in (
            Card("h200", 141, (9, 0), 132, 2048),
            Card("h100", 80, (9, 0), 132, 2048),
            Card("a100-80", 80, (8, 0), 108, 2048),
            Card("a100-40", 40, (8, 0), 108, 2048),
            Card("a10", 24, (8, 6), 72, 1536),
            Card("l4", 24, (8, 9), 58, 1536),
            Card("l40s", 48, (8, 9), 142, 1536),
            Card("v100-32", 32, (7, 0), 80, 2048),
            Card("v100-16", 16, (7, 0), 80, 2048),
            Card("t4", 16, (7, 5), 40, 1024),
            Card("rtx3080", 10, (8, 6), 68, 1536),
            Card("rtx3090", 24, (8, 6), 82, 1536),
            Card("rtx4090", 24, (8, 9), 128, 1536),
        )
    }
)
DEFAULT_CARD = "h200"
_VARIANTS = {"ti", "super", "laptop", "max", "nvl"}  # words that make another product of a name


def card_called(name: str) -> Card:
    """Return a card of the table. Raises ConfigError."""
    card = CARDS.get(name.lower().replace(" ", ""))
    if card is None:
        raise ConfigError(f"device={name!r}: expected one of {', '.join(CARDS)}")
    return card


def card_of(device_name: str, total_bytes: int | None) -> Card | None:
    """Return the card that the driver calls so; None for one that the table does not have."""
    words = device_name.lower().replace("-", " ").split()
    if _VARIANTS.intersection(words):
        return None
    model = "".join(words[words.index("rtx") :][:2]) if "rtx" in words else ""
    fitting = [
        card
        for card in CARDS.values()
        if card.name == model or card.name.partition("-")[0] in words
    ]
    if total_bytes is None:
        return fitting[0] if len(fitting) == 1 else None
    near = [card for card in fitting if abs(card.gib - total_bytes / 1024**3) < card.gib * 0.1]
    return near[0] if near else None
