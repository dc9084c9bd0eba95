"""The driver's view of GPU memory. Only this module talks to NVML; importing it does nothing."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import psutil
import pynvml

# Below this, a difference between the device's rise and the process figure is bookkeeping of the
# driver (page tables, rounding), not memory that the process figure leaves out.
_MANAGED_THRESHOLD_BYTES = 64 * 1024**2
_UNKNOWN = (
    "the driver does not tell which process on the device is this training (a container, MPS or "
    "WSL): memory is the rise of the whole device, other processes' included"
)


class DeviceUsage(NamedTuple):
    """Bytes in use on a device, and per process where the driver says."""

    used: int
    processes: Mapping[int, int | None]


@contextmanager
def session(api: Any = pynvml) -> Iterator[bool]:
    """Open NVML for the block and yield whether there is a driver to talk to."""
    try:
        api.nvmlInit()
    except api.NVMLError:
        yield False
        return
    try:
        yield True
    finally:
        with suppress(api.NVMLError):
            api.nvmlShutdown()


def usable_gpus(api: Any = pynvml) -> list[str]:
    """Return the names of the GPUs that a CUDA program started now would find."""
    with session(api) as available:
        return _visible(api, os.environ.get("CUDA_VISIBLE_DEVICES")) if available else []


def _visible(api: Any, shown: str | None) -> list[str]:
    """Return the names of the GPUs that this CUDA_VISIBLE_DEVICES shows, as CUDA reads it."""
    gpus = [(_text(api.nvmlDeviceGetUUID(gpu)), gpu) for gpu in _gpus(api)]
    if shown is None:
        return [_text(api.nvmlDeviceGetName(gpu)) for _, gpu in gpus]
    parts = [(_text(api.nvmlDeviceGetUUID(i)), i) for _, gpu in gpus for i in _instances(api, gpu)]
    found: dict[str, str] = {}
    for entry in map(str.strip, shown.split(",")):
        if entry.isdecimal():
            matches = gpus[int(entry) : int(entry) + 1]
        else:  # the beginning of a UUID will do, if it is that of one device alone
            matches = [pair for pair in (*gpus, *parts) if entry and pair[0].startswith(entry)]
        if len(matches) != 1:
            break  # this entry names no device, and hides all that follow
        uuid, handle = matches[0]
        if uuid in found:
            return []  # a device that is named twice hides them all
        found[uuid] = _text(api.nvmlDeviceGetName(handle))
    return list(found.values())


def driver_version(api: Any = pynvml) -> str | None:
    """Return the NVIDIA driver's version; None without a driver."""
    with session(api) as available:
        return _text(api.nvmlSystemGetDriverVersion()) if available else None


def usage_by_uuid(api: Any = pynvml) -> dict[str, DeviceUsage]:
    """Return what is in use on every device and MIG instance, by UUID.

    Taken before the first CUDA call, which is when nobody can say yet which device it will be:
    the ordering of CUDA and that of NVML differ.
    """
    found: dict[str, DeviceUsage] = {}
    for gpu in _gpus(api):
        for handle in (gpu, *_instances(api, gpu)):
            with suppress(api.NVMLError):
                found[_text(api.nvmlDeviceGetUUID(handle))] = _usage(api, handle)
    return found


class GpuProcess(NamedTuple):
    """A process that holds memory of a device; bytes where the driver says."""

    pid: int
    name: str
    bytes: int | None


class Baseline(NamedTuple):
    """What has to be known from the start to tell later what a training takes of a device."""

    uuid: str
    pid: int | None
    """Its number in the driver's list; in a container it can be another than its own."""
    used: int
    others: int
    seen: tuple[int, ...]
    ours: tuple[int, ...]
    """Where it is not known which process it is: those that it can be."""


def baseline(
    cuda_uuid: str,
    before: Mapping[str, DeviceUsage],
    pid: int,
    held: int = 0,
    api: Any = pynvml,
) -> Baseline:
    """Look at the device with the UUID that CUDA reports, of a process that has a context there.

    `before` is what `usage_by_uuid` said before it made its context. Where nobody looked then, its
    share is what the driver says, or at least `held` bytes. Needs an open `session`; raises
    LookupError where NVML knows no such device.
    """
    handle, uuid = _find(api, cuda_uuid)
    usage, known = _usage(api, handle), before.get(uuid)
    new = _new_processes(usage, known)
    seen = (*usage.processes, pid)
    found = pid if pid in usage.processes else new.pop() if len(new) == 1 else None
    own = usage.processes.get(found) if found is not None else None
    return Baseline(
        uuid=uuid,
        pid=found,
        used=known.used if known else usage.used - (own or held),
        others=_others(known or usage, found),
        seen=seen,
        ours=tuple(new) if found is None else (found,),
    )


class GpuReader:
    """Reads one device, and what a training takes of it. Needs an open `session`."""

    def __init__(self, start: Baseline, api: Any = pynvml) -> None:
        self._api = api
        self.start = start
        self._handle = api.nvmlDeviceGetHandleByUUID(start.uuid)
        self._seen = set(start.seen)
        self._late: dict[int, GpuProcess] = {}
        self.uuid, self.pid = start.uuid, start.pid
        self.warning = None if self.pid is not None else _UNKNOWN
        processes = _usage(api, self._handle).processes
        self.sees_process = self.pid is not None and processes.get(self.pid) is not None
        self.total_bytes = int(_memory(api, self._handle).total)
        self.managed = False
        """Whether the device's rise was ever clearly above the process figure."""

    def usage(self) -> DeviceUsage:
        """Read the device once: two calls of 8 microseconds each."""
        usage = _usage(self._api, self._handle)
        for pid, count in usage.processes.items():
            if pid not in self._seen:
                self._note(pid, count or 0)
        return usage

    def _note(self, pid: int, count: int) -> None:
        """Remember a process that came later, by its name while it lives, at its largest."""
        known = self._late.get(pid)
        if known is None or count > (known.bytes or 0):
            name = known.name if known else _process_name(pid)
            self._late[pid] = GpuProcess(pid, name, count or None)

    def late_comers(self) -> tuple[GpuProcess, ...]:
        """Name the others that came onto the device since the reader was made."""
        return tuple(self._late.values())

    def taken(self, usage: DeviceUsage) -> int:
        """Return the bytes that this process takes from others.

        The process figure of the driver, or the device's rise where that is larger: the process
        figure leaves managed memory out, in which paged optimizers keep their state. What other
        processes took meanwhile is not ours, where it is known which of them we are.
        """
        others_rise = _others(usage, self.pid) - self.start.others
        rise = usage.used - self.start.used - others_rise
        own = None if self.pid is None else usage.processes.get(self.pid)
        if own is None:
            return max(rise, 0)
        if rise - own > _MANAGED_THRESHOLD_BYTES:
            self.managed = True
            return rise
        return own

    def other_processes(self) -> tuple[GpuProcess, ...]:
        """Name the others that hold memory of this device."""
        usage = _usage(self._api, self._handle)
        return tuple(
            GpuProcess(pid, _process_name(pid), count)
            for pid, count in sorted(usage.processes.items())
            if pid not in self.start.ours
        )


def _new_processes(usage: DeviceUsage, before: DeviceUsage | None) -> set[int]:
    """Return the processes that came onto the device since; none where nobody looked before."""
    return set(usage.processes) - set(before.processes) if before else set()


def _others(usage: DeviceUsage, own: int | None) -> int:
    """Return what others hold; 0 where nobody knows who the others are."""
    if own is None:
        return 0
    return sum(count or 0 for other, count in usage.processes.items() if other != own)


def _usage(api: Any, handle: Any) -> DeviceUsage:
    used = int(_memory(api, handle).used)
    try:
        found = api.nvmlDeviceGetComputeRunningProcesses(handle)
    except api.NVMLError:
        return DeviceUsage(used, {})
    return DeviceUsage(used, {entry.pid: entry.usedGpuMemory for entry in found})


def _find(api: Any, cuda_uuid: str) -> tuple[Any, str]:
    """Return handle and NVML's UUID of the device that CUDA calls `cuda_uuid` (without prefix)."""
    for prefix in ("GPU-", "MIG-"):
        with suppress(api.NVMLError):
            handle = api.nvmlDeviceGetHandleByUUID(prefix + cuda_uuid)
            return handle, _text(api.nvmlDeviceGetUUID(handle))
    raise LookupError(f"NVML knows no device with the UUID {cuda_uuid} that CUDA reports")


def _gpus(api: Any) -> Iterator[Any]:
    for index in range(api.nvmlDeviceGetCount()):
        with suppress(api.NVMLError):  # a card that others keep to themselves
            yield api.nvmlDeviceGetHandleByIndex(index)


def _instances(api: Any, gpu: Any) -> Iterator[Any]:
    try:
        count = api.nvmlDeviceGetMaxMigDeviceCount(gpu)
    except api.NVMLError:
        return
    for index in range(count):
        with suppress(api.NVMLError):  # most slots are empty
            yield api.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)


def _memory(api: Any, handle: Any) -> Any:
    """Read version 2, which keeps the driver's own reserve out of `used`; version 1 if refused."""
    try:
        return api.nvmlDeviceGetMemoryInfo(handle, version=api.nvmlMemory_v2)
    except api.NVMLError:
        return api.nvmlDeviceGetMemoryInfo(handle)


def _process_name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return "unknown"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
