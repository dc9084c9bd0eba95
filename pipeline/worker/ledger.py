"""Where the bytes of the peak are: counted from the objects, at the moment of the peak."""

import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pipeline.record import Composed, Phase

Event = Mapping[str, Any]
"""An entry of torch's memory history: action, addr, size, time_us."""


class Storages(NamedTuple):
    """Bytes of distinct storages by address: what is shared or tied counts once."""

    on_device: Mapping[int, int]
    managed: int
    """Bytes in managed memory, where paged optimizers keep their state."""

    @classmethod
    def of(cls, values: Iterable[Any], device: torch.device) -> "Storages":
        """Return those of all tensors in these values that lie on this device."""
        found, managed = dict[int, int](), dict[int, int]()
        for tensor in tensors(values):
            storage = tensor.untyped_storage()
            if getattr(tensor, "is_paged", False):  # bitsandbytes marks them so
                managed[storage.data_ptr()] = storage.nbytes()
            elif tensor.device.type == device.type:
                found[storage.data_ptr()] = storage.nbytes()
        return cls(found, sum(managed.values()))


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested containers; of a quantized one, what it is made of."""
    if isinstance(value, torch.Tensor):
        if is_traceable_wrapper_subclass(value):  # torchao's quantized states
            names, _ = value.__tensor_flatten__()
            for name in names:
                yield from tensors(getattr(value, name))
        else:
            yield value
    elif isinstance(value, dict):
        yield from tensors(value.values())
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for item in value:
            yield from tensors(item)


def highest(events: Sequence[Event]) -> int:
    """Return the index of the event after which most was allocated; -1: at the beginning."""
    total = most = 0
    where = -1
    for index, event in enumerate(events):
        if event["action"] == "alloc":
            total += event["size"]
        elif event["action"] == "free_requested":
            total -= event["size"]
        if total > most:
            most, where = total, index
    return where


def alive(storages: Mapping[int, int], events: Sequence[Event], where: int) -> int:
    """Return the bytes of these storages, seen at the end, that were there after event `where`.

    An address that the history does not mention was there all the time; else what counts is the
    last time that it was given out, since other tensors may have had it before.
    """
    given: dict[int, int] = {}
    for index, event in enumerate(events):
        if event["action"] == "alloc" and event["addr"] in storages:
            given[event["addr"]] = index
    return sum(count for address, count in storages.items() if given.get(address, -1) <= where)


def phase_at(marks: Sequence[tuple[int, Phase]], time_us: int) -> Phase | None:
    """Return the phase that had begun last at this time."""
    return next((phase for begun, phase in reversed(marks) if begun <= time_us), None)


class PeakTrace:
    """Takes one optimizer step apart: what is alive at its peak, and in which phase that is.

    On a GPU by torch's own memory history of that step, which is exact; its figures are those of a
    step in the steady state, and what another step's peak has beyond it counts as temporaries. On
    a CPU, which has no such history, all that the step holds is taken to be alive at the peak.
    """

    def __init__(
        self, device: torch.device, keep_snapshot: Callable[[bytes], None] | None = None
    ) -> None:
        self._device = device
        self._keep_snapshot = keep_snapshot
        self._marks: list[tuple[int, Phase]] = []
        self._gradients = Storages({}, 0)
        self._hook: Any = None
        self._recording = False

    def begin(self, model: nn.Module, compiled: bool) -> None:
        """Begin to record, before the step's first forward pass."""
        if self._device.type == "cuda":
            context = "all" if self._keep_snapshot else None
            try:
                torch.cuda.memory._record_memory_history(context=context, stacks="python")
                self._recording = True
            except RuntimeError:  # another allocator than torch's own keeps no history
                return
            if not compiled:  # a hook would break its graph; there the phase stays unknown
                self._hook = model.register_forward_hook(lambda *_: self._mark("backward"))
                self._mark("forward")

    def _mark(self, phase: Phase) -> None:
        self._marks.append((time.time_ns() // 1000, phase))

    def next_micro_batch(self) -> None:
        """Note that another forward pass follows."""
        if self._hook is not None:
            self._mark("forward")

    def before_optimizer(self, model: nn.Module) -> None:
        """Note the gradients while they are there; the optimizer is next."""
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        self._gradients = Storages.of(gradients, self._device)
        if self._hook is not None:
            self._mark("optimizer")

    def end(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Composed:
        """Stop recording and return what was alive at the peak."""
        weights = Storages.of([*model.parameters(), *model.buffers()], self._device)
        state = Storages.of(optimizer.state.values(), self._device)
        events = self._events()
        where = highest(events) if self._recording else len(events)
        known = self._recording and 0 <= where < len(events)
        return Composed(
            weights=sum(weights.on_device.values()),
            gradients=alive(self._gradients.on_device, events, where),
            optimizer=alive(state.on_device, events, where),
            managed=state.managed,
            phase=phase_at(self._marks, events[where]["time_us"]) if known else None,
        )

    def _events(self) -> list[Event]:
        if self._hook is not None:
            self._hook.remove()
        if not self._recording:
            return []
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        if self._keep_snapshot:
            self._keep_snapshot(pickle.dumps(snapshot))
        return list(snapshot["device_traces"][torch.cuda.current_device()])
