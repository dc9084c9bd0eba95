"""Every buffer that operators take and give back, in order."""

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.cards import Card
from pipeline.record import MIB
from pipeline.worker.cuda_temporaries import PRODUCTS, temporaries


class Change(NamedTuple):
    """A buffer comes, with its bytes, or goes, with None."""

    buffer: int
    size: int | None
    backward: bool


class Tracer(TorchDispatchMode):
    """Notes the storages that come and go while it is active, in named parts.

    Each has a number. What it is for can be told at any time, also after it came.
    """

    def __init__(self, card: Card) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parts: dict[str, list[Change]] = {}
        self.kinds: dict[int, str] = {}
        self._numbers: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._count = 0
        self._card = card
        self._workspaces: set[bool] = set()
        self._changes: list[Change] = []

    def __exit__(self, *args: Any) -> None:
        """See TorchDispatchMode. What goes with the training itself is no part of it."""
        super().__exit__(*args)  # type: ignore[no-untyped-call]
        self._watched.clear()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say that no call has to be kept from a compiler, which would take time."""
        return False

    def begin(self, part: str) -> None:
        """Note what follows under this name."""
        self._changes = self.parts.setdefault(part, [])

    def call(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Say what the storages of these tensors are for; the first word counts."""
        for tensor in tensors:
            number = self._numbers.get(tensor.untyped_storage()._cdata)
            if number is not None:
                self.kinds.setdefault(number, kind)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See TorchDispatchMode."""
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1  # there are no data: to whatever is asked of them, the answer is yes
        if func is torch.ops.prim.device.default:
            return args[0].fake_device  # asked so often that the detour below would double the time
        backward = _in_backward()
        if func in PRODUCTS and backward not in self._workspaces:
            # cuBLAS keeps one for each thread that uses it, and the backward pass has its own.
            self._workspaces.add(backward)
            self._come(int(self._card.workspace_mib * MIB), backward)
        passing = [self._come(size, backward) for size in temporaries(func, args, self._card)]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._watch(tensor.untyped_storage(), backward)
        for number in passing:
            self._changes.append(Change(number, None, backward))
        return result

    def _come(self, size: int, backward: bool) -> int:
        self._count += 1
        self._changes.append(Change(self._count, size, backward))
        return self._count

    def _watch(self, storage: torch.UntypedStorage, backward: bool) -> None:
        key = storage._cdata
        if key in self._numbers or storage.nbytes() == 0:
            return
        number = self._numbers[key] = self._come(storage.nbytes(), backward)

        def gone(_: Any) -> None:
            del self._numbers[key], self._watched[key]
            self._changes.append(Change(number, None, _in_backward()))

        self._watched[key] = weakref.ref(storage, gone)


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
