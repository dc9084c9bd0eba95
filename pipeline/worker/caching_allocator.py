"""The block policy of torch's CUDA caching allocator, played without a GPU.

What a training takes from the device is not what its tensors hold: blocks are rounded, cut from
segments, and kept when they are free. The rules and constants are those of PyTorch's
`c10/cuda/CUDACachingAllocator.cpp`.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

_MIB = 1024**2
BLOCK = 512
"""Every size is rounded up to this (kMinBlockSize)."""
_SMALL = 1 * _MIB  # up to here a block comes from the pool of small ones (kSmallSize)
_SMALL_SEGMENT = 2 * _MIB  # kSmallBuffer
_LARGE_SEGMENT = 20 * _MIB  # for blocks below _OWN_SEGMENT (kLargeBuffer)
_OWN_SEGMENT = 10 * _MIB  # from here on a segment is as large as its first block (kMinLargeAlloc)
_SEGMENT_ROUNDING = 2 * _MIB  # kRoundLarge


def rounded(size: int, unit: int = BLOCK) -> int:
    """Return the next multiple of `unit`."""
    return -(-size // unit) * unit


@dataclass(slots=True, eq=False)
class Block:
    """A stretch of a segment. Neighbours are those of the same segment."""

    address: int
    size: int
    small: bool
    before: "Block | None" = None
    after: "Block | None" = None
    free: bool = False


class CachingAllocator:
    """Hands out blocks as torch does, and counts them; all sizes in bytes."""

    def __init__(self, *, expandable: bool = False) -> None:
        self.allocated = 0
        self.reserved = 0
        self._expandable = expandable
        self._next_address = 0
        # Free blocks by size, then address: the first that is large enough is the best fit.
        self._pools: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._free: dict[int, Block] = {}
        self._tails: dict[bool, Block] = {}

    def allocate(self, size: int) -> Block:
        """Return a block of at least this size."""
        wanted = max(rounded(size), BLOCK)
        small = wanted <= _SMALL
        block = self._best_fit(wanted, small) or self._more(wanted, small)
        left = block.size - wanted
        if left >= BLOCK if small or self._expandable else left > _SMALL:
            self._split(block, wanted)
        self.allocated += block.size
        return block

    def release(self, block: Block) -> None:
        """Take a block back and join it with free neighbours."""
        self.allocated -= block.size
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._take(other)
                block = _joined(block, other)
        if block.after is None:
            self._tails[block.small] = block
        self._keep(block)

    def _best_fit(self, wanted: int, small: bool) -> Block | None:
        pool = self._pools[small]
        index = bisect_left(pool, (wanted, 0))
        if index == len(pool):
            return None
        return self._take(self._free[pool[index][1]])

    def _more(self, wanted: int, small: bool) -> Block:
        """Return a block of memory that is new to the allocator."""
        if self._expandable:
            return self._grown(wanted, small)
        if small:
            size = _SMALL_SEGMENT
        else:
            size = _LARGE_SEGMENT if wanted < _OWN_SEGMENT else rounded(wanted, _SEGMENT_ROUNDING)
        return self._mapped(size, small)

    def _grown(self, wanted: int, small: bool) -> Block:
        """Return a block at the end of the pool's one segment, which grows by whole pages."""
        page = _SMALL_SEGMENT if small else _LARGE_SEGMENT
        tail = self._tails.get(small)
        if tail is not None and tail.free:
            self._take(tail)
            new = self._mapped(rounded(wanted - tail.size, page), small)
            new.before, tail.after = tail, new
            return _joined(new, tail)
        new = self._mapped(rounded(wanted, page), small)
        if tail is not None:
            new.before, tail.after = tail, new
        self._tails[small] = new
        return new

    def _mapped(self, size: int, small: bool) -> Block:
        block = Block(self._next_address, size, small)
        self._next_address += size
        self.reserved += size
        return block

    def _split(self, block: Block, wanted: int) -> None:
        rest = Block(
            block.address + wanted, block.size - wanted, block.small, block, block.after, True
        )
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, wanted
        if rest.after is None:
            self._tails[block.small] = rest
        self._keep(rest)

    def _keep(self, block: Block) -> None:
        block.free = True
        self._free[block.address] = block
        insort(self._pools[block.small], (block.size, block.address))

    def _take(self, block: Block) -> Block:
        block.free = False
        del self._free[block.address]
        pool = self._pools[block.small]
        del pool[bisect_left(pool, (block.size, block.address))]
        return block


def _joined(block: Block, other: Block) -> Block:
    """Return one block in place of two neighbours."""
    low, high = (block, other) if block.address < other.address else (other, block)
    low.size += high.size
    low.after = high.after
    if high.after is not None:
        high.after.before = low
    return low
