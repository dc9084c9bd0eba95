"""From what came and went in a rehearsal to what the device gives away, and for what."""

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from pipeline.record import Ledger
from pipeline.worker.caching_allocator import Block, CachingAllocator
from pipeline.worker.rehearsal import BUILD, END, FIRST, FURTHER, STEP, STEP_AGAIN
from pipeline.worker.trace import Tracer

_STEPS = 4  # after the first ones blocks keep their places
_FURTHER = 3  # micro-batches after the first: more of them change nothing
_REST = "activations"


def replay(tracer: Tracer, accumulation: int, *, expandable: bool, context: int) -> Ledger:
    """Return the peak of a training that is made of the tracer's parts, taken apart.

    The parts are those of the moment when most is allocated; what the allocator holds more than
    that, then or later, is unused.
    """
    allocator = CachingAllocator(expandable=expandable)
    live: dict[int, Block] = {}
    now, at_peak = Counter[str](), Counter[str]()
    peak, phase = 0, None
    for part in _order(accumulation):
        for number, size, backward in tracer.parts.get(part, ()):
            kind = tracer.kinds.get(number, _REST)
            # A part may leave what another one would have taken away: the next round does.
            block = live.pop(number, None)
            if block is not None:
                now[kind] -= block.size
                allocator.release(block)
            if size is not None:
                live[number] = allocator.allocate(size)
                now[kind] += live[number].size
            if allocator.allocated > peak:
                peak, at_peak, phase = allocator.allocated, now.copy(), _phase(part, backward)
    return Ledger(
        weights=at_peak["weights"],
        gradients=at_peak["gradients"],
        optimizer=at_peak["optimizer"],
        activations=at_peak[_REST],
        unused=allocator.reserved - peak,
        context=context,
        phase=phase,
    )


def _order(accumulation: int) -> Iterator[str]:
    yield BUILD
    for number in range(_STEPS):
        yield FIRST
        yield from [FURTHER] * min(accumulation - 1, _FURTHER)
        yield STEP if number == 0 else STEP_AGAIN
        yield END


def _phase(part: str, backward: bool) -> Literal["forward", "backward", "optimizer"] | None:
    if part == BUILD:
        return None
    if part in (FIRST, FURTHER):
        return "backward" if backward else "forward"
    return "optimizer"
